"""A stand-in for kubectl, not kubectl: it keeps objects in a folder, and has the few commands that are used.

Its answers are those that kubectl 1.32 gave when it was tried by hand, against an API that had the same objects.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import yaml

STORE = Path(os.environ["STAND_IN_STORE"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--context")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("verb")
    parser.add_argument("names", nargs="*")
    parser.add_argument("-f", dest="file")
    parser.add_argument("-l", dest="label")
    parser.add_argument("-o", dest="output")
    parser.add_argument("--wait")
    parser.add_argument("--prefix", action="store_true")
    parser.add_argument("--tail")
    parser.add_argument("--max-log-requests")
    asked = parser.parse_intermixed_args()
    with (STORE / "calls.txt").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    folder = STORE / asked.namespace
    folder.mkdir(exist_ok=True)
    return {"create": create, "get": get, "delete": delete, "logs": logs}[asked.verb](asked, folder)


def create(asked: argparse.Namespace, folder: Path) -> int:
    for made in yaml.safe_load_all(Path(asked.file).read_text()):
        kind, name = made["kind"].lower(), made["metadata"]["name"]
        group = made["apiVersion"].rpartition("/")[0]
        full = f"{kind}.{group}" if group else kind
        file = folder / f"{full}%{name}.json"
        if kind == os.environ.get("STAND_IN_FORBIDS"):
            return refuse(f'Error from server (Forbidden): {kind}s is forbidden: User "me" cannot create it')
        if file.exists():
            return refuse(f'Error from server (AlreadyExists): {full} "{name}" already exists')
        file.write_text(json.dumps(made))
        print(f"{full}/{name}")
    return 0


def get(asked: argparse.Namespace, folder: Path) -> int:
    assert asked.output == 'jsonpath={range .items[*]}{.metadata.name} {.status}{"\\n"}{end}'
    for file in selected(folder, asked.names, asked.label):
        made = json.loads(file.read_text())
        status = made.get("status")
        print(made["metadata"]["name"], "" if status is None else json.dumps(status))
    return 0


def delete(asked: argparse.Namespace, folder: Path) -> int:
    if asked.label is None:
        files = [folder / f"{name.replace('/', '%')}.json" for name in asked.names]
    else:
        files = selected(folder, asked.names, asked.label)
        if not files:
            print("No resources found")
    for file in files:
        file.unlink()
        print(file.stem.replace("%", "/"))
    return 0


def logs(asked: argparse.Namespace, folder: Path) -> int:
    found = selected(folder, ["jobs.batch"], asked.label)
    if not found:
        print("No resources found in default namespace.", file=sys.stderr)
        return 0
    print(f"[pod/{found[0].stem.partition('%')[2]}-0-x7k2p/fairlead] step 10")
    return 0


def selected(folder: Path, kinds: list[str], label: str) -> list[Path]:
    singular = {kind.replace("s.", ".", 1) if "." in kind else kind.removesuffix("s") for kind in kinds[0].split(",")}
    files = (file for file in sorted(folder.glob("*.json")) if file.stem.partition("%")[0] in singular)
    return [file for file in files if label in json.loads(file.read_text())["metadata"]["labels"]]


def refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
