"""A model that was swapped, folded or accelerated is a plain module to other tools, as one that was not."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fathoms
from tiny_models import random_images


def changed(how):
    torch.manual_seed(0)
    name = "cait_xxs24_224" if how == "accelerate" else "deit3_small_patch16_224"
    model = timm.create_model(name, img_size=32, depth=1, num_classes=5).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if how == "fold":
        return fathoms.fold(model)[0]
    if how == "accelerate":
        fathoms.accelerate(model)
    else:
        fathoms.swap_norms(model, how, calibrate=random_images(2, 32))
    return model


def loaded(model, x):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin(x)


def grads_of_each(model, x):
    """The output, if the gradients of a sum are the sum of those of each image."""

    def loss(parameters, one):
        return torch.func.functional_call(model, parameters, (one[None],)).sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    model.zero_grad()
    model(x).sum().backward()
    for name, p in model.named_parameters():
        assert torch.allclose(each[name].sum(0), p.grad, rtol=1e-3, atol=1e-3), name
    return model(x)


TOOLS = {
    "deepcopy": lambda model, x: copy.deepcopy(model)(x),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model))(x),
    "load_state_dict": loaded,
    "functional_call": lambda model, x: torch.func.functional_call(
        model, dict(model.named_parameters()), (x,)
    ),
    "gradients of each image": grads_of_each,
    "average": lambda model, x: AveragedModel(model)(x),
    "float64": lambda model, x: copy.deepcopy(model).double()(x.double()).float(),
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "fx": lambda model, x: torch.fx.symbolic_trace(model)(x),
    "compile": lambda model, x: torch.compile(model, backend="eager", fullgraph=True)(x),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.compile
@pytest.mark.parametrize("how", ["learnable_scaler", "dyt", "fold", "accelerate"])
def test_other_tools_work_after_surgery(how):
    model, x = changed(how), random_images(2, 32)
    expected = model(x)
    for name, tool in TOOLS.items():
        assert torch.allclose(tool(model, x), expected, rtol=1e-3, atol=1e-4), name


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize("how", ["learnable_scaler", "accelerate"])
def test_what_no_script_holds_is_said_in_one_line(how):
    with pytest.raises(fathoms.FathomsError, match="TorchScript cannot compile it; use torch.export"):
        torch.jit.script(changed(how))


@pytest.mark.parametrize("how", ["learnable_scaler", "fold", "accelerate"])
def test_every_module_with_parameters_of_its_own_is_called(how):
    model, called = changed(how), set()
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(lambda *_, name=name: called.add(name))
    model(random_images(2, 32))
    missed = {n for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))} - called
    # timm's own modules whose weights its code reads; accelerate reads two linears as matrices.
    read = {n for n in missed if isinstance(model.get_submodule(n), nn.Linear)}
    assert missed == read
    assert not read or how == "accelerate"
