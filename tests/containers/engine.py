"""Images and containers without an engine's daemon: buildah and podman, with storage that is removed after the test."""

import os
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.services import ROOT

PROGRAMS = ROOT / ".tether" / "containers"
TOOLS = PROGRAMS / "tools"
IMAGE, SERVERS = "localhost/tether:test", "localhost/tether:servers"
UID = 10001
# Podman asks for higher ones than this process may set.
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")


class Engine:
    """buildah and podman with storage of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self.podman_options = [*self._storage, "--runtime", "runc", "--cgroup-manager", "cgroupfs"]

    def build(self, tag: str, *words: str) -> float:
        """Build an image; returns the seconds that it took."""
        began = time.monotonic()
        done = self.command(
            "buildah", *self._storage, "bud", "--isolation", "chroot", "--network", "host", "--tag", tag, *words
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return time.monotonic() - began

    def has(self, tag: str) -> bool:
        """Whether an image is there."""
        return self.podman("image", "exists", tag).returncode == 0

    def podman(self, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """A command of podman; `variables` are in its environment, from where `--env NAME` takes them."""
        return self.command("podman", *self.podman_options, *words, **variables)

    def run(
        self, image: str, *words: str, options: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """A container that may write nowhere but to /tmp and what `options` mount, on this machine's network."""
        variables = dict(environment or {})
        named = [word for name in variables for word in ("--env", name)]  # a value would stand in the list of processes
        limits = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges")
        kept = () if "--detach" in options else ("--rm",)
        return self.podman(
            "run", *kept, "--network", "host", *LIMITS, *limits, *named, *options, image, *words, **variables
        )  # fmt: skip

    def command(self, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """A program in the project's folder."""
        return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **variables}, cwd=ROOT)


@contextmanager
def engine() -> Iterator[Engine]:
    """An engine; skips where its programs are not installed. TETHER_IMAGES names a folder whose images stay."""
    programs = ("buildah", "podman", "runc")
    if not (PROGRAMS / "base.tar").exists() or not all(map(shutil.which, programs)) or os.geteuid() != 0:
        pytest.skip("`make test-containers` installs what this needs; without an engine it has to be root")
    kept = os.environ.get("TETHER_IMAGES")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="tether-images-"))
    try:
        yield Engine(folder)
    finally:
        if not kept:
            shutil.rmtree(folder)


def build_images(engine: Engine) -> None:
    """Build the images on a small Debian, from this working tree and the project's locked packages."""
    if engine.has(IMAGE) and engine.has(SERVERS):
        return
    base = engine.folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROGRAMS / "base.tar", base)
    (base / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
    print(f"\n{engine.build('localhost/base', str(base)):6.0f} s  base")
    shutil.rmtree(base)
    trust = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    config = engine.folder / "pip.conf"
    config.write_text("[global]\ncert = /etc/test-ca.crt\ntimeout = 180\n")
    here = ["--volume", f"{trust}:/etc/test-ca.crt:ro", "--volume", f"{config}:/etc/pip.conf:ro",
            "--volume", f"{PROGRAMS / 'torch'}:/torch:ro"]  # fmt: skip
    chosen = ["--build-arg", "BASE=localhost/base", "--build-arg", "TORCH_INDEX=file:///torch/"]
    common = [*here, *chosen, "--file", "infra/Containerfile", "."]
    print(f"{engine.build(IMAGE, *common):6.0f} s  image")
    print(f"{engine.build(SERVERS, '--target', 'servers', *common):6.0f} s  image of the servers")
    print(engine.podman("images").stdout)
