"""A pass for torch.compile: a product that is added to something of its size makes the sum itself.

In a block x + F(x) the branch ends in a linear, and in its backward pass the gradient of x is one that came along
the skip plus a product. torch.compile writes such a product, then reads it again to add. Here `add_product` and
`gelu_mlp` take the addition in. They do so only where all that reads the sum are products, sums over tokens and
other graphs: a norm would read it in the pass that adds, which then costs little.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fathoms.ops import add_product, cublas
from fathoms.ops.add_product import why_not_cublas

aten: Any = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}
MLP = "fathoms::gelu_mlp"
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
TURNS = {aten.permute.default, aten.t.default, aten.transpose.int}

# Below, an addition takes less time than the call from Python that spares it, where steps are not replayed.
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
        for found in _paying(list(_additions(graph))):
            stream = replaced.get(found.stream, found.stream)
            replaced[found.addition] = _rewrite(graph, found._replace(stream=stream))
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """What torch's caches know it by: its text, and what it depends on outside of a graph."""
        return get_hash_for_files((__file__, str(add_product.__file__))), cublas.why_not_library()


def _additions(graph: fx.Graph) -> Iterator[Found]:
    """All additions that an operation could take in."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if node.kwargs or not all(isinstance(argument, fx.Node) for argument in node.args):
            continue
        for stream, branch in (node.args, node.args[::-1]):
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
    """Whether an operation can make this sum, and is known to be faster."""
    if not _is_product(found.product) or len(found.product.users) != 1 or found.product.kwargs:
        return False
    total, stream, made = (node.meta["val"] for node in found)
    if stream.shape != total.shape or made.shape[-1] != total.shape[-1]:
        return False
    if not (total.dtype == stream.dtype == made.dtype and total.is_contiguous() and stream.is_contiguous()):
        return False
    tokens = math.prod(total.shape[:-1])
    if not isinstance(tokens, int) or tokens < MIN_TOKENS:
        return False
    if _name(found.product) == MLP:
        # Its sixth argument is left out where there is nothing to add to.
        return len(found.product.args) == 5
    *bias, a, b = (cast(fx.Node, argument).meta["val"] for argument in found.product.args)
    return all(part.dim() == 1 for part in bias) and why_not_cublas(made, a, b, *bias) is None


def _paying(found: list[Found]) -> list[Found]:
    """Those whose sum is read as it is; each that falls out may take others with it."""
    while True:
        additions = {each.addition for each in found}
        kept = [each for each in found if _read_as_it_is(each.addition, additions)]
        if len(kept) == len(found):
            return kept
        found = kept


def _read_as_it_is(node: fx.Node, additions: set[fx.Node]) -> bool:
    return all(
        user.op == "output"
        or user in additions
        or _is_product(user)
        or _is_column_sum(user)
        or (user.target in VIEWS | TURNS and _read_as_it_is(user, additions))
        for user in node.users
    )


def _is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS or _name(node) == MLP


def _is_column_sum(node: fx.Node) -> bool:
    """Whether it sums over tokens, as the gradient of a bias does, which takes a pass of its own anyway."""
    if node.target is not aten.sum.dim_IntList:
        return False
    last = node.all_input_nodes[0].meta["val"].dim() - 1
    return not {last, -1}.intersection(cast(list[int], node.args[1]))


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
