"""An environment to stage: small, and a witness of where it is."""

from __future__ import annotations

import sysconfig
import tarfile
import venv
from pathlib import Path


def environment(folder: Path) -> Path:
    """Return the tar of an environment whose Python says where it and its data are; its packages are this one's."""
    bare = venv.EnvBuilder(symlinks=True).ensure_directories(folder / "venv")
    venv.EnvBuilder(symlinks=True).create(folder / "venv")
    (site_packages,) = Path(bare.env_dir).glob("lib/python*/site-packages")
    (site_packages / "here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    note = """if True:
        import os, sys
        line = f"{sys.prefix} {os.environ['HPCFL_DATA']} {os.listdir(os.environ['HPCFL_DATA'])}\\n"
        os.write(1, line.encode())
    """
    (site_packages / "sitecustomize.py").write_text(note)
    with tarfile.open(folder / "env.tar", "w") as tar:
        tar.add(bare.env_dir, ".")
    return folder / "env.tar"
