"""Fixtures of all tests: equal random numbers, the device of kernel tests, tiny runs."""

import signal

import jaxtyping
import pytest
import torch

from fathoms.ops.dispatch import HAS_TRITON, interpreting
from tiny_runs import ON_DIGITS, ON_IMAGES, TinyRuns, write_images

# A shell that runs the suite in the background ignores these, and so would every process that a test starts.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption(
        "--rewrite", action="store_true", help="write the kept lines of tests/cli/mistakes.txt anew"
    )


@pytest.fixture(autouse=True)
def _same_numbers():
    """Whichever tests ran before, so that one that fails once fails again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_compiler(request):
    """Compiled code of earlier tests does not count towards the compiler's limit, and its settings are put back."""
    if request.node.get_closest_marker("compile") is None:
        yield
        return
    import torch._dynamo

    torch._dynamo.reset()
    limit = torch._dynamo.config.fail_on_recompile_limit_hit
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=limit):
        yield
    torch._dynamo.reset()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The run-time type checker is off in tests of the marker plain.

    Kernel tests run in Triton's interpreter on the CPU, which must be on from the first import, or on a GPU.
    """
    jaxtyping.config.update("jaxtyping_disable", item.get_closest_marker("plain") is not None)
    if item.get_closest_marker("kernels") is None:
        return
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if not interpreting() and not torch.cuda.is_available():
        pytest.skip("kernel tests run in Triton's interpreter: TRITON_INTERPRET=1 pytest -m kernels")


@pytest.fixture
def kernel_device():
    """The device that kernel tests run on."""
    return torch.device("cpu" if interpreting() else "cuda")


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """One block, trained on the digits for a moment."""
    from fathoms.cli.main import main

    output = tmp_path_factory.mktemp("runs")
    words = ["--epochs", "3", "--depth", "1", "--lr", "3e-3", "--warmup-epochs", "0", "--device", "cpu"]
    assert main(["train", "--output", str(output), "--experiment", "digits", *words]) == 0
    return output / "digits"


@pytest.fixture(scope="session")
def tiny_images(tmp_path_factory):
    """A data set of 256 training and 32 validation images in an .npz file."""
    return write_images(tmp_path_factory.mktemp("images") / "images.npz")


@pytest.fixture
def tiny_runs(tmp_path, tiny_images):
    """Runs on the tiny images; see tests/tiny_runs.py."""
    return TinyRuns(tmp_path, ON_IMAGES, tiny_images)


@pytest.fixture
def digit_runs(tmp_path):
    """Runs on the embedded digits; see tests/tiny_runs.py."""
    return TinyRuns(tmp_path, ON_DIGITS)
