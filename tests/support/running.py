"""A running system in a short temporary folder, driven through the command line as a user would.

`System.start` types `dflash-up up -d --wait`; the other methods type the other verbs. Everything
has a deadline; `stop` checks that nothing is left behind.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "common" / "demo" / "prompts"
CLI = (sys.executable, "-c", "from common.launcher.cli import main; main()")


def prompt_files():
    return sorted(PROMPTS.glob("*.py.txt"))


def prompt_of(path):
    """A held-out prompt; what follows it is never the end of the text, see `ignore_eos`."""
    return path.read_text(encoding="utf-8")


def wait_until(condition, what, timeout_s=30.0):
    """Poll `condition` until it is true; returns its value."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


class System:
    """One run of dflash-up, in a folder of its own."""

    def __init__(self, **environ):
        self.folder = Path(tempfile.mkdtemp(prefix="dfu-", dir="/tmp"))
        self.run_dir = self.folder / "run"
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("DFLASH_")},
            "DFLASH_RUN_RUN_DIR": str(self.run_dir),
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
            **environ,
        }
        self.seen = {}

    def command(self, *arguments, timeout_s=120, check=True, stdin=None):
        """Type one command; returns the finished process with text output."""
        done = subprocess.run(
            [*CLI, *map(str, arguments)],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(
                f"dflash-up {' '.join(map(str, arguments))}: exit {done.returncode}\n"
                f"{done.stdout}\n{done.stderr}\n{self.logs()}"
            )
        return done

    def popen(self, *arguments):
        """Type one command and leave it running."""
        return subprocess.Popen(
            [*CLI, *map(str, arguments)],
            env=self.environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self, *arguments):
        self.command("up", "-d", "--wait=100", *arguments)
        self.seen.update({worker["name"]: worker["pid"] for worker in self.ps()})
        return self

    def ps(self):
        return json.loads(self.command("ps", "--json").stdout)["processes"]

    def worker(self, name):
        return next((worker for worker in self.ps() if worker["name"] == name), None)

    def generate(self, *arguments, prompt=None, file=None, max_tokens=64, check=True):
        source = ["--prompt-file", file] if file is not None else [prompt]
        done = self.command(
            "generate", *source, "--max-tokens", max_tokens, "--json", *arguments, check=check
        )
        return json.loads(done.stdout) if done.returncode == 0 else done

    def logs(self):
        texts = []
        for path in sorted(self.run_dir.glob("logs/*")):
            with contextlib.suppress(OSError):
                texts.append(f"--- {path.name}\n{path.read_text()[-3000:]}")
        return "\n".join(texts)

    def processes(self):
        """Every live process that belongs to this run, found by its folder."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            line = process.info["cmdline"] or []
            if process.info["status"] != psutil.STATUS_ZOMBIE and str(self.folder) in " ".join(
                line
            ):
                found.append(process)
        return found

    def stop(self):
        """`down`, then nothing may be left: no process, no socket, no file."""
        try:
            if self.run_dir.exists():
                self.command("down", timeout_s=60)
            wait_until(lambda: not self.processes(), "all processes gone", 10)
            assert not self.run_dir.exists() or list(self.run_dir.iterdir()) == []
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def running(*arguments, **environ):
    """A started system, stopped and checked at the end."""
    system = System(**environ)
    try:
        yield system.start(*arguments)
        sys.stderr.write(system.logs())  # shown with a test that failed
    except BaseException:
        sys.stderr.write(system.logs())
        for process in system.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(system.folder, ignore_errors=True)
        raise
    system.stop()
