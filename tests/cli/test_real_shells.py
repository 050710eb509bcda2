"""Completion as people have it: installed by the command, in the real shell, typed on a terminal."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

from .conftest import SOURCE

fcntl, termios, resource, pty = (
    pytest.importorskip(name, reason="needs a pseudo-terminal")
    for name in ("fcntl", "termios", "resource", "pty")
)

EVIL = "\n$(touch PWNED)[1].py"

# In place of `hessinit`: it answers the shell, installs, and otherwise notes its arguments.
COMMAND = """#!/bin/sh
if [ -z "$_HESSINIT_COMPLETE$INSTALLING" ]; then
    printf '%s\\n' "$(printf '<%s>' "$@")" >> "{noted}"; exit
fi
cd "{folder}"
exec "{python}" -m hessinit "$@"
"""

LINES = {
    "hessinit in": "<initialize>",  # the first <TAB> of a session counts, too
    r"hessinit measure my\ dir/größe.py:pre": "<measure><my dir/größe.py:prepared>",
    "hessinit measure 'my dir/größe.py:pre": "<measure><my dir/größe.py:prepared>",
    "hessinit measure ~/at": "<measure><HOME/at_home.py:problem>",
    "hessinit measure net.py:problem --curvature=h": "<measure><net.py:problem><--curvature=hessian>",
    # The command that was typed is asked, not another one of that name.
    "there/hessinit measure c:d/": "<measure><c:d/only_there.py:problem>",
    # Names that a shell might run are left to it, as are all other files.
    "hessinit measure evil/": f"<measure><evil/{EVIL}>",
}


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request):
    if shutil.which(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return request.param


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "work"
    files = ["my dir/größe.py", "there/c:d/only_there.py", f"evil/{EVIL}", "../home/at_home.py"]
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def problem(): pass\n" + "def prepared(): pass\n" * name.startswith("my"))
    # Else fish would begin to read all manual pages.
    (tmp_path / "home/.local/share/fish/generated_completions").mkdir(parents=True)
    for place, asked_in in ((tmp_path / "bin", folder), (folder / "there", folder / "there")):
        place.mkdir(exist_ok=True)
        text = COMMAND.format(noted=tmp_path / "noted", python=sys.executable, folder=asked_in)
        (place / "hessinit").write_text(text, encoding="utf-8")
        (place / "hessinit").chmod(0o755)
    return folder


def environment_for(folder):
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    path = f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    given = {"PATH": path, "HOME": str(folder.parent / "home"), "PYTHONPATH": str(SOURCE)}
    return {**kept, **given, "TERM": "dumb", "LC_ALL": "C.UTF-8", "INPUTRC": "/dev/null"}


def install(shell, folder, **options):
    """As a person does it: which shell it is the command finds out by itself."""
    return subprocess.run(
        [shell, "-c", "hessinit --install-completion || exit 2"],
        cwd=folder, env={**environment_for(folder), "INSTALLING": "1"}, capture_output=True, encoding="utf-8",
        timeout=60, **options,
    )  # fmt: skip


class Terminal:
    """A shell on a pseudo-terminal: what it shows is kept for the message of a failure."""

    def __init__(self, shell, folder):
        self.noted, self.known, self.seen = folder.parent / "noted", "", ""
        self.noted.touch()
        self.reader, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [shell, "-i"], cwd=folder, env=environment_for(folder), stdin=terminal, stdout=terminal,
            stderr=terminal, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(terminal)

    def type(self, keys):
        os.write(self.reader, keys.encode())

    def wait_until_ready(self):
        for _ in range(20):  # what is typed while a shell starts may be lost
            self.type("hessinit ready\r")
            if self._read_until(lambda: self.noted.stat().st_size, seconds=3):
                return
        raise AssertionError(self.seen)

    def wait_for_note(self):
        """What the next command that runs is given."""
        known, self.known = self.known, self._read_until(self._more_notes, seconds=60)
        assert self.known, self.seen
        return self.known.removeprefix(known)

    def _more_notes(self):
        notes = self.noted.read_text(encoding="utf-8").replace("<ready>\n", "")
        return notes if notes != self.known and notes.endswith(">\n") else None

    def _read_until(self, find, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self.reader], [], [], 0.01)[0]:
                self.seen += os.read(self.reader, 65536).decode(errors="replace")
            if found := find():
                return found
        return None

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.reader)


def test_a_real_shell_completes_what_was_typed(shell, folder):
    installed = install(shell, folder)
    assert installed.returncode == 0, installed.stderr
    assert f"{shell} completion installed in" in installed.stdout
    terminal = Terminal(shell, folder)
    try:
        terminal.wait_until_ready()
        for line, arguments in LINES.items():
            terminal.type(f"{line}\t\r")
            told = arguments.replace("HOME", str(folder.parent / "home"))
            assert terminal.wait_for_note() == f"{told}\n", (line, terminal.seen)
    finally:
        terminal.close()
    assert not list(folder.parent.rglob("PWNED"))


def test_a_full_disk_leaves_what_the_shell_reads_as_it_was(folder):
    read = folder.parent / "home" / ".bashrc"
    read.write_text("# mine\n" * 500)

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3500, 3500))

    result = install("bash", folder, preexec_fn=fill)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: completion cannot be installed: [Errno 27] File too large.\n")
    assert read.read_text() == "# mine\n" * 500


def test_a_home_that_cannot_be_written_is_named(folder):
    (folder.parent / "home" / ".bashrc").mkdir()
    result = install("bash", folder)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: completion cannot be installed: [Errno 21] Is a directory:")
    assert "Traceback" not in result.stderr
