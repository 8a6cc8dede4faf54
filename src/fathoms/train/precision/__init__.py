"""Precision policies, torch.compile, CUDA graphs, bfloat16 compute models of float32 master weights."""

from fathoms.train.precision.compile import compile_blocks, kept_for_backward
from fathoms.train.precision.master_weights import ComputeCopy
from fathoms.train.precision.policy import PRECISIONS, set_stream

__all__ = ["PRECISIONS", "ComputeCopy", "compile_blocks", "kept_for_backward", "set_stream"]
