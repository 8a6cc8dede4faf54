"""Data that stays with a worker: read and hashed once, and kept on the device from cell to cell."""

from __future__ import annotations

from fathoms.data.sources.splits import Roles, open_roles
from fathoms.errors import ConfigError
from fathoms.train.job import Job


class ResidentData:
    """The splits of the data set that the last cell used.

    A loader keeps a source's pixels on its device for as long as the source lives, so that the next cell finds them
    there. Nothing of a run is kept: order, crops and augmentation follow from its seed.
    """

    def __init__(self) -> None:
        self._key: tuple[str | None, float | None] | None = None
        self._roles: Roles | None = None
        self._fingerprints: set[str] = set()
        """Those that were found to be of these data."""

    def roles(self, job: Job, fingerprint: str, test: bool = True) -> Roles:
        """The data of a cell by its roles.

        Args:
            job: The cell's run.
            fingerprint: Of the data that the comparison was planned with; other data are an error.
            test: Whether the test set is among them. Trials of tuning never see it.
        """
        key = (job.data, job.recipe.val_share)
        if self._roles is None or key != self._key:
            # The old data go before the new ones come.
            self._roles = None
            self._roles, self._key = open_roles(job.data, job.recipe.val_share), key
            self._fingerprints = set()
        roles = self._roles
        if fingerprint not in self._fingerprints and not roles.has_fingerprint(fingerprint):
            raise ConfigError(
                f"{job.data}: the data changed since the comparison was planned; bring them back, or start another"
            )
        self._fingerprints.add(fingerprint)
        return roles if test else roles._replace(test=None)
