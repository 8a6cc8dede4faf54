"""One rank of a comparison: Muon on sharded matrices and on whole ones. Is given `rank`, `ranks` and `folder`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fathoms.training.muon import MuonWithAdamW
from fathoms.training.optimizer_step import step_unless

rank: int
ranks: int
folder: str

# A stack of three, one of two, and two of one, one of them with fewer rows than ranks.
SHAPES = [(13, 7), (7, 13), (13, 7), (16, 16), (13, 7), (7, 13), (1, 5)]


def matrices():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES])


torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
whole, sharded = matrices(), matrices()
fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
pair = [
    MuonWithAdamW([{"params": [*model.parameters()], "weight_decay": 0.1, "algorithm": "muon"}], lr=0.1)
    for model in (whole, sharded)
]
for step, hold in enumerate([0.0, 0.0, 1.0, 0.0]):
    torch.manual_seed(step)
    for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = distribute_tensor(a.grad, b.device_mesh, b.placements)
    for optimizer in pair:
        step_unless(optimizer, torch.tensor(hold))
for a, b, start in zip(whole.parameters(), sharded.parameters(), matrices().parameters(), strict=True):
    momentum = pair[1].state[b]["momentum_buffer"]
    assert isinstance(b, DTensor)
    assert isinstance(momentum, DTensor)
    assert torch.equal(a, b.full_tensor())
    assert torch.equal(pair[0].state[a]["momentum_buffer"], momentum.full_tensor())
    assert not torch.equal(a, start)
dist.destroy_process_group()
Path(folder, f"same-{rank}").touch()
