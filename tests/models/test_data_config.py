"""Data configuration of named models, beside timm's."""

from __future__ import annotations

import pytest

from fathoms.models.zoo import ALIASES, MODELS, data_config

timm = pytest.importorskip("timm", reason="the extra 'timm' is not installed")
THERE = [name for name in MODELS if name in set(timm.list_models())]


def test_a_name_that_timm_has_is_prepared_as_in_timm():
    assert len(THERE) > 30
    for name in THERE:
        assert data_config(name) == data_config(f"timm/{name}"), name


def test_the_authors_models_are_prepared_as_the_authors_do_and_an_alias_as_its_name():
    half = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.9, "interpolation": "bicubic"}
    assert all(data_config(name) == half for name in MODELS if "_embed_dim" in name or "_dpn_" in name)
    assert all(data_config(alias) == data_config(name) for alias, name in ALIASES.items())


def test_a_registered_model_brings_its_data_configuration_to_timms_own_script():
    from timm.data import resolve_data_config

    import fathoms.timm_models  # noqa: F401

    for name, small in {"cait_xxs24_224": {"depth": 1}, "vit_s32_dpn_224": {"depth": 1}}.items():
        model = timm.create_model(f"fathoms_{name}", **small)
        assert data_config(name).items() <= resolve_data_config(model=model).items()
