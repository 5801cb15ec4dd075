"""How a command ends and where it writes: interrupts, full disks, closed pipes, devices, links.

Purpose: Ctrl-C ends any command with one line and code 130 and leaves nothing half-written; output
reaches devices, pipes and what links point to, and only regular files are replaced.
A process that is to be interrupted waits in a named pipe: who opens its other end knows that.
Command: pytest tests/bench/test_program.py
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_batching.bench.outputs import Outputs
from megatron_batching.bench.simulate import run_timeline
from megatron_batching.plan import BatchingOptions, Layout, plan_mini_batch
from megatron_batching.program import INTERRUPTED
from megatron_batching.schedules.files import check_file, check_folder, write_text

LIMIT_S = 120.0  # of what takes a second on an idle machine
PLAN = ["plan", "@azure_code:64", "--pp=2", "--max-tokens=9000", "--json"]


def start(*arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_batching", *arguments]
    return popen(command, **{"stdout": subprocess.PIPE, **kwargs})


def popen(
    command: list[str],
    *,
    stdout: Any = None,
    on_interrupt: signal.Handlers = signal.SIG_DFL,
    before: Callable[[], None] = lambda: None,
) -> subprocess.Popen[str]:
    """Start a process that answers interrupts as told, whatever the tests themselves do.

    A shell starts its background jobs with interrupts ignored, and children inherit that.
    """

    def prepare() -> None:
        signal.signal(signal.SIGINT, on_interrupt)
        before()

    return subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, preexec_fn=prepare
    )


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe: opening it waits for the other end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def timeline(tmp_path: Path) -> str:
    plan = plan_mini_batch([5, 6, 7], Layout(pp=2), BatchingOptions(max_tokens_per_micro_batch=8))
    path = tmp_path / "timeline.json"
    write_text(path, json.dumps(plan.simulate(0, _model(2)).timeline("step").to_json()))
    return str(path)


def _model(stages: int) -> Any:
    from megatron_batching.plan import uniform_cost_model

    return uniform_cost_model(Layout(pp=stages))


def test_an_interrupt_ends_a_command_with_one_line(pipe: Path, tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("w") as output:
        process = start("plan", str(pipe), *PLAN[2:], stdout=output)
        with pipe.open("w"):  # it reads lengths now
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (INTERRUPTED, "interrupted\n")
    assert (tmp_path / "plan.json").read_text() == ""


def test_an_interrupted_file_is_as_before(pipe: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    script = f"""
from megatron_batching.program import end_on_interrupt
end_on_interrupt()
from megatron_batching.schedules.files import write_whole
def fill(partial):
    partial.write_text("half")
    open({str(pipe)!r}).read()
write_whole({str(page)!r}, fill)
"""
    process = popen([sys.executable, "-c", script])
    with pipe.open("w"):
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (INTERRUPTED, "interrupted\n")
    assert page.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "pipe"]


def test_a_command_that_was_started_to_ignore_interrupts_does_so(pipe: Path) -> None:
    process = start("plan", str(pipe), "--micro-batch-size=1", on_interrupt=signal.SIG_IGN)
    with pipe.open("w") as lengths:
        process.send_signal(signal.SIGINT)
        lengths.write("7\n")
    printed, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (0, "")
    assert printed


@pytest.mark.parametrize("samples", [8, 4_000])
def test_output_that_cannot_be_written_is_one_line(samples: int) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    arguments = ["plan", f"@azure_code:{samples}", *PLAN[2:]]
    with open("/dev/full", "w") as full:
        process = start(*arguments, stdout=full)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert said == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("samples", [8, 4_000])
def test_a_reader_that_left_is_no_error_to_report(samples: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start("plan", f"@azure_code:{samples}", *PLAN[2:], stdout=writer)
    os.close(writer)
    _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (1, "")


def test_closed_output_is_an_error() -> None:
    process = start(*PLAN, stdout=None, before=lambda: os.close(1))
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert said.startswith("error: standard output is closed") and said.count("\n") == 1


def test_standard_output_may_be_named_as_a_file(timeline: str) -> None:
    process = start("timeline", timeline, "--html=/dev/stdout")
    page, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert page.lstrip().startswith("<!") and page.rstrip().endswith("</html>")
    assert "wrote /dev/stdout" in said


def test_a_named_pipe_gets_the_bytes_and_stays(timeline: str, pipe: Path) -> None:
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    run_timeline([timeline], outputs=Outputs(html=pipe))
    reader.join(LIMIT_S)
    assert read[0].rstrip().endswith("</html>")
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_device_gets_the_bytes_and_stays() -> None:
    master, slave = os.openpty()
    device = Path(os.ttyname(slave))
    write_text(device, "seen\n")
    assert os.read(master, 100).split() == [b"seen"]
    assert stat.S_ISCHR(device.lstat().st_mode)
    os.close(slave)
    os.close(master)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target.html", tmp_path / "link.html"
    link.symlink_to(target)
    if is_there:
        target.write_text("old")
        target.chmod(0o640)
    assert write_text(link, "new") == link
    assert link.is_symlink() and link.readlink() == target
    assert target.read_text() == "new" and not target.is_symlink()
    if is_there:
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list((tmp_path / "far").iterdir()) == [target]


def test_places_that_cannot_be_written_are_named_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    check_file(tmp_path / "file", "--html")
    check_file(tmp_path / "new" / "page.html", "--html")
    check_folder(tmp_path / "new" / "folder", "output_dir")
    with pytest.raises(ValueError, match=r"--html '.*' cannot be written \(Is a directory\)"):
        check_file(tmp_path, "--html")
    with pytest.raises(ValueError, match="Not a directory"):
        check_file(tmp_path / "file" / "page.html", "--html")
    with pytest.raises(ValueError, match=r"output_dir '.*file' cannot be written"):
        check_folder(tmp_path / "file", "output_dir")
    with pytest.raises(ValueError, match="cannot be written"):
        check_folder("/proc/nowhere", "output_dir")
    with pytest.raises(ValueError, match="Bad file descriptor"):
        check_file("/dev/fd/987654", "--html")
    assert sorted(tmp_path.rglob("*")) == before
