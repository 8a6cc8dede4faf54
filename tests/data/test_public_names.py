"""Public names of fathoms.data: the list at run time and the one for type checkers are the same."""

import ast
import inspect

import fathoms.data


def typed_names():
    """The names that `fathoms.data` imports for type checkers, each with its module."""
    tree = ast.parse(inspect.getsource(fathoms.data))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_see_the_names_that_exist_at_run_time():
    assert typed_names() == fathoms.data._HOMES


def test_every_public_name_can_be_imported():
    for name in fathoms.data.__all__:
        assert getattr(fathoms.data, name) is not None
