"""Check built distributions: valid metadata, a readable README, the licence and `py.typed`; used by `nox -s build`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename


def problems_of_wheel(path: Path) -> list[str]:
    """What is wrong with one wheel."""
    name, version, *_ = parse_wheel_filename(path.name)
    with zipfile.ZipFile(path) as wheel:
        files = wheel.namelist()
        [metadata_file] = [file for file in files if file.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(wheel.read(metadata_file), validate=True)  # raises an ExceptionGroup
    module = name.replace("-", "_")
    strays = {file.split("/")[0] for file in files if ".dist-info/" not in file} - {module}
    checks = {
        "its name and its metadata disagree": (canonicalize_name(metadata.name), metadata.version) != (name, version),
        "no README as its description": len(metadata.description or "") < 200,
        "no licence expression": metadata.license_expression != "Apache-2.0",
        "no licence text": not any("/licenses/" in file and file.endswith("LICENSE") for file in files),
        "no py.typed": f"{module}/py.typed" not in files,
        "no list of the plugins of all packages": module == "fairlead" and "fairlead/first_party.json" not in files,
        f"unexpected top-level files {sorted(strays)}": bool(strays),
    }
    return [f"{path.name}: {problem}" for problem, holds in checks.items() if holds]


def problems_of_sdist(path: Path) -> list[str]:
    """What is wrong with one sdist."""
    parse_sdist_filename(path.name)
    with tarfile.open(path) as sdist:
        files = {member.name.partition("/")[2] for member in sdist.getmembers()}
    return [f"{path.name}: no {file}" for file in ("PKG-INFO", "README.md", "pyproject.toml") if file not in files]


def main(folder: Path) -> int:
    """Check every file in `folder`; 1 when anything is wrong or there is nothing."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    problems = [line for path in wheels for line in problems_of_wheel(path)]
    problems += [line for path in sdists for line in problems_of_sdist(path)]
    if not wheels or len(wheels) != len(sdists):
        problems.append(f"{folder}: {len(wheels)} wheels and {len(sdists)} sdists")
    print("\n".join(problems) or f"{len(wheels)} wheels and {len(sdists)} sdists, nothing wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
