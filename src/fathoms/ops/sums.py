"""A pass for torch.compile: a product that is added to something of its size makes the sum itself.

In a block x + F(x) the branch ends in a linear, and in its backward pass the gradient of x is one that came along
the skip plus a product. torch.compile writes such a product, then reads it again to add. Here `add_product` and
`gelu_mlp` take the addition in. They do so only where all that reads the sum are products, sums over tokens, further
additions of this kind and other graphs: a norm would read it in the pass that adds, which then costs little. Streams of
two dimensions are not seen: torch has made an `addmm` of them before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fathoms.ops.add_product import why_not_cublas
from fathoms.ops.cublas import why_not_library

aten: Any = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}
MLP = "fathoms::gelu_mlp"
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
TURNS = {aten.permute.default, aten.t.default, aten.transpose.int}

# From here on whole models have been measured to be faster, where they are replayed.
MIN_TOKENS = 2**14


class Found(NamedTuple):
    """An addition, what it adds to, and the product that it adds."""

    addition: fx.Node
    stream: fx.Node
    product: fx.Node


class FuseSums(CustomGraphPass):
    """Put additions into the products that they follow."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        replaced: dict[fx.Node, fx.Node] = {}
        found_all = list(_additions(graph))
        additions = {found.addition for found in found_all}
        for found in found_all:
            if not _read_as_it_is(found.addition, additions):
                continue
            stream = replaced.get(found.stream, found.stream)
            replaced[found.addition] = _rewrite(graph, found._replace(stream=stream))
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """What torch's caches know it by: its text and that of the operations, and whether there is cuBLAS."""
        here = Path(__file__).parent
        files = ("sums.py", "add_product.py", "cublas.py", "triton/mlp.py")
        return get_hash_for_files(tuple(str(here / file) for file in files)), why_not_library()


# One for all, since torch.compile makes a graph again for each pass that it does not know.
FUSE_SUMS = FuseSums()


def _additions(graph: fx.Graph) -> Iterator[Found]:
    """All additions that an operation could take in."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        first, second = node.args
        # A product that is added to itself is not one to take in.
        if node.kwargs or first is second or not all(isinstance(part, fx.Node) for part in node.args):
            continue
        for stream, branch in ((first, second), (second, first)):
            found = Found(node, stream, _behind_views(branch))
            if _fits(found):
                yield found
                break


def _behind_views(node: fx.Node) -> fx.Node:
    """Where the numbers of a node come from, as long as nobody else reads them on the way."""
    while node.target in VIEWS and len(node.users) == 1:
        node = node.all_input_nodes[0]
    return node


def _fits(found: Found) -> bool:
    """Whether an operation can make this sum."""
    if not _is_product(found.product) or len(found.product.users) != 1 or found.product.kwargs:
        return False
    total, stream, made = (node.meta["val"] for node in found)
    if not _is_known(total) or not _is_known(stream) or math.prod(total.shape[:-1]) < MIN_TOKENS:
        return False
    # A product of fewer rows is repeated by the addition.
    if stream.shape != total.shape or made.shape[-1] != total.shape[-1] or made.numel() != total.numel():
        return False
    if not (total.dtype == stream.dtype == made.dtype and total.is_contiguous() and stream.is_contiguous()):
        return False
    if _name(found.product) == MLP:
        # Its sixth argument is left out where there is nothing to add to.
        return len(found.product.args) == 5
    *bias, a, b = (cast(fx.Node, argument).meta["val"] for argument in found.product.args)
    if not _is_known(a) or not _is_known(b) or any(part.shape != made.shape[1:] for part in bias):
        return False
    return why_not_cublas(made, a, b, *bias) is None


def _is_known(value: object) -> bool:
    """Whether it is a tensor of at least two dimensions, all of a size that is known now."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return all(isinstance(size, int) for size in value.shape)


def _read_as_it_is(node: fx.Node, additions: set[fx.Node]) -> bool:
    """Whether nothing reads it that torch would have put into one pass with the addition."""
    return all(
        user.op == "output"
        or user in additions
        or _is_product(user)
        or _is_column_sum(user)
        or (user.target in VIEWS and _read_as_it_is(user, additions))
        or (user.target in TURNS and all(_is_product(reader) for reader in user.users))
        for user in node.users
    )


def _is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS or _name(node) == MLP


def _is_column_sum(node: fx.Node) -> bool:
    """Whether it sums over tokens, as the gradient of a bias does, which takes a pass of its own anyway."""
    if node.target is not aten.sum.dim_IntList:
        return False
    dims, last = cast(list[int] | None, node.args[1]), node.all_input_nodes[0].meta["val"].dim() - 1
    return bool(dims) and not {last, -1}.intersection(dims)


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _rewrite(graph: fx.Graph, found: Found) -> fx.Node:
    """Put the sum in the place of an addition."""
    addition, stream, product = found
    with graph.inserting_before(addition):
        flat = _reshaped(graph, stream, product.meta["val"].shape)
        if _name(product) == MLP:
            sum_ = graph.call_function(cast(Any, product.target), (*product.args, flat))
        else:
            *bias, a, b = product.args
            given = (flat, a, b, bias[0] if bias else None)
            sum_ = graph.call_function(torch.ops.fathoms.add_product.default, given)
        sum_.meta["val"] = product.meta["val"]
        whole = _reshaped(graph, sum_, addition.meta["val"].shape)
    addition.replace_all_uses_with(whole)
    return whole


def _reshaped(graph: fx.Graph, node: fx.Node, shape: torch.Size) -> fx.Node:
    reshaped = graph.call_function(aten.reshape.default, (node, list(shape)))
    reshaped.meta["val"] = node.meta["val"].reshape(shape)
    return reshaped
