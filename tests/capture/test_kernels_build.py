"""Which kernel is chosen, and that nothing is lost where the native one cannot be had."""

import fcntl
import logging
import os
import shlex
import shutil
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from capture.kernel_checks import CPU, SEED, WIDTH, expect, measured, needs_compiler, random
from capture.sketch_oracle import truth
from rankscope.capture.kernels import build, choose, choose_kernel, native, period_signs
from rankscope.capture.kernels.bits import native_sum
from rankscope.capture.kernels.build import BuildError, built_library
from rankscope.capture.kernels.dot import choose_dot, plain_dot
from rankscope.capture.kernels.native import NativeKernel
from rankscope.capture.kernels.plain import PlainKernel
from rankscope.capture.state.digest import digest_bits
from rankscope.capture.state.meter import StateMeter
from rankscope.capture.totals import GradientTotals
from support.accidents import state_of, wait_until


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("RANKSCOPE_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Build anew, into a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_what_was_built()
    yield tmp_path / "cache"
    forget_what_was_built()


def forget_what_was_built():
    for cached in (native.load_functions, native.try_to_load, native_sum):
        cached.cache_clear()


@pytest.fixture
def counted_compiler(tmp_path, monkeypatch):
    """A compiler that adds a line to a file whenever it runs, and is quick for it does little."""
    log = tmp_path / "runs"
    script = tmp_path / "counted cc"
    compiler = shlex.quote(str(shutil.which("cc")))
    script.write_text(f'#!/bin/sh\necho run >>"{log}"\nexec {compiler} "$@" -O0\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", shlex.quote(str(script)))
    return log


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch):
    """The same, but it always fails."""
    log = tmp_path / "failures"
    monkeypatch.setenv("CC", f"sh -c 'echo run >>\"{log}\"; exit 1' --")
    return log


def chosen(caplog) -> str:
    with caplog.at_level(logging.DEBUG, logger="rankscope"):
        kernel = choose_kernel(CPU, WIDTH, period_signs(SEED))
    gradient = random(20 * WIDTH + 9)
    expect(measured(kernel, gradient), truth("weight", SEED, gradient, WIDTH))
    assert len(caplog.records) == (kernel.name == "torch")
    return kernel.name


@needs_compiler
def test_the_native_kernel_is_chosen_where_there_is_a_compiler(caplog):
    assert chosen(caplog) == "native"


def test_the_user_can_forbid_it(caplog, monkeypatch):
    monkeypatch.setenv("RANKSCOPE_NATIVE", "0")
    assert chosen(caplog) == "torch"
    assert "RANKSCOPE_NATIVE=0" in caplog.text


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "no C compiler"), ("false", "failed"), ("true", "failed"),
     (f"{sys.executable} -c 'raise SystemExit(\"no such flag\")'", "failed: no such flag")],
)  # fmt: skip
def test_without_a_compiler_that_works_it_is_plain_torch(
    caplog, monkeypatch, empty_cache, compiler, reason
):
    monkeypatch.setenv("CC", compiler)
    assert chosen(caplog) == "torch"
    assert reason in caplog.text
    assert not list(empty_cache.rglob("*.so"))


def test_a_compiler_that_fails_runs_once_per_process_and_before_the_training(
    empty_cache, broken_compiler
):
    StateMeter(torch.nn.Linear(2, 2), None, replicated=True)
    runs = broken_compiler.read_text().count("run")
    assert runs == len(build._TUNING)
    assert isinstance(choose_kernel(CPU, WIDTH, period_signs(SEED)), PlainKernel)
    assert choose_dot(CPU) is plain_dot
    digest_bits(random(50))
    for load in (native.load_functions, *(partial(native.compiled, n) for n in ("digest", "dot"))):
        with pytest.raises(BuildError, match="failed"):
            load()
    assert broken_compiler.read_text().count("run") == runs


def test_a_setting_of_the_compiler_that_cannot_be_read_is_no_error(
    caplog, monkeypatch, empty_cache
):
    monkeypatch.setenv("CC", "cc 'and no end")
    assert chosen(caplog) == "torch"
    assert choose_dot(CPU) is plain_dot
    assert "CC cannot be read" in caplog.text


def test_sources_that_cannot_be_read_are_no_error(caplog, monkeypatch, empty_cache):
    monkeypatch.setattr(build, "_processor", build.Path("/no/such/file").read_text)
    assert choose_dot(CPU) is plain_dot
    assert chosen(caplog) == "torch"


def test_a_cache_that_cannot_be_written_is_no_error(caplog, monkeypatch, empty_cache, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert chosen(caplog) == "torch"


@needs_compiler
def test_a_damaged_library_is_no_error(caplog, empty_cache, counted_compiler):
    """One page of it is there: to load it would end the process by SIGBUS."""
    library = built_library()
    whole = library.read_bytes()
    library.write_bytes(whole[:5000])
    forget_what_was_built()
    assert chosen(caplog) == "native"
    (rebuilt,) = library.parent.glob("*.so")
    assert len(rebuilt.read_bytes()) > 5000
    assert counted_compiler.read_text().count("run") == 2


@pytest.mark.parametrize("spoil", ["writable folder", "writable parent", "a link", "another's"])
def test_a_cache_that_others_can_write_is_refused(caplog, empty_cache, tmp_path, spoil):
    planted = tmp_path / "planted"
    folder = empty_cache / "rankscope" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    if spoil == "a link":
        planted.mkdir(mode=0o700)
        folder.rmdir()
        folder.symlink_to(planted)
    elif spoil == "another's":
        try:
            os.chown(folder, 65534, 65534)
        except PermissionError:  # only root gives away what it has
            folder.chmod(0o770)
    else:
        (folder if "folder" in spoil else folder.parent).chmod(0o777)
    assert isinstance(choose_kernel(CPU, WIDTH, period_signs(SEED)), PlainKernel)
    assert choose_dot(CPU) is plain_dot
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "expected a directory that only user" in warning.message
    assert "XDG_CACHE_HOME" in warning.message
    assert not list(folder.iterdir())


@needs_compiler
@pytest.mark.parametrize("spoil", ["writable", "a link"])
def test_a_library_that_others_can_write_is_built_anew(
    empty_cache, counted_compiler, spoil, tmp_path
):
    library = built_library()
    if spoil == "writable":
        library.chmod(0o777)
    else:
        library.rename(tmp_path / "elsewhere.so")
        library.symlink_to(tmp_path / "elsewhere.so")
    anew = built_library()
    assert not anew.is_symlink()
    assert stat.S_IMODE(anew.stat().st_mode) == 0o700
    assert counted_compiler.read_text().count("run") == 2


def test_a_lock_that_was_planted_as_a_link_is_not_followed(caplog, empty_cache, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = empty_cache / "rankscope" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    name = f"kernels-{build._key(build._compiler(), (*build._SOURCES, *build._HEADERS))}"
    (folder / f"{name}.lock").symlink_to(victim)
    assert chosen(caplog) == "torch"
    assert victim.read_text() == "mine"


@needs_compiler
def test_many_ranks_compile_once(empty_cache, counted_compiler):
    with ThreadPoolExecutor(8) as ranks:
        libraries = set(ranks.map(lambda _: built_library(), range(8)))
    assert len(libraries) == 1
    assert counted_compiler.read_text().count("run") == 1
    assert built_library() in libraries
    assert counted_compiler.read_text().count("run") == 1
    left = {path.suffix for path in libraries.pop().parent.iterdir()}
    assert left == {".so", ".lock"}


@pytest.mark.slow
@needs_compiler
def test_another_processor_or_compiler_gets_a_library_of_its_own(
    empty_cache, counted_compiler, monkeypatch
):
    first = built_library()
    monkeypatch.setattr(build, "_processor", lambda: "another")
    second = built_library()
    monkeypatch.setenv("CC", f"{os.environ['CC']} -DANOTHER")
    assert len({first, second, built_library()}) == 3
    assert counted_compiler.read_text().count("run") == 3


def test_nobody_waits_for_long(monkeypatch, empty_cache, tmp_path):
    monkeypatch.setattr(build, "_PATIENCE", 0.2)
    children = tmp_path / "children"
    monkeypatch.setenv("CC", f"sh -c 'sleep 300 & echo $$ $! >{children}; wait' --")
    with pytest.raises(BuildError, match="the compiler takes too long"):
        built_library()
    for pid in map(int, children.read_text().split()):
        wait_until(lambda pid=pid: state_of(pid) in ("", "Z"))
    (lock,) = empty_cache.rglob("*.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match="another process"):
            built_library()


@needs_compiler
def test_a_kernel_that_errs_is_not_used(caplog, monkeypatch):
    class Wrong(NativeKernel):
        def measure(self, flat, signs, start, into, group):
            super().measure(flat, signs, start, into, group)
            if signs is None:
                into.squared_norms[group] *= 1 + 1e-5

    monkeypatch.setattr(choose, "NativeKernel", Wrong)
    assert chosen(caplog) == "torch"
    assert "errs on torch.float32" in caplog.text


def test_a_kernel_that_fails_later_is_replaced_once(caplog):
    plain = PlainKernel(CPU, WIDTH, period_signs(SEED))

    class Broken(PlainKernel):
        def add(self, *args):
            raise RuntimeError("out of registers\nand more")

    broken = Broken(CPU, WIDTH, period_signs(SEED))
    gradient = random(3 * WIDTH)
    with caplog.at_level(logging.INFO, logger="rankscope"):
        safe = choose.SafeKernel(broken, plain)
        expect(measured(safe, gradient, gradient), truth("weight", SEED, gradient.repeat(2), WIDTH))
        safe = choose.SafeKernel(broken, plain)
        totals = GradientTotals.zeros(1, WIDTH, CPU)
        safe.measure(gradient, None, 0, totals, 0)
    assert float(totals.squared_norms) == pytest.approx(float(gradient.double().square().sum()))
    assert [record.message.count("out of registers") for record in caplog.records] == [1, 1]
    with pytest.raises(IndexError):  # nothing is hidden once it is plain torch that fails
        safe.measure(gradient, None, 0, totals, 1)


def test_other_devices_run_plain_torch():
    meta = torch.device("meta")
    kernel = choose_kernel(meta, WIDTH, period_signs(SEED))
    assert isinstance(kernel, PlainKernel)


def test_choosing_touches_no_random_state():
    before = torch.get_rng_state()
    choose_kernel(CPU, WIDTH, period_signs(SEED))
    assert torch.equal(torch.get_rng_state(), before)
