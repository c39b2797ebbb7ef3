"""``python tests/tutorials.py``: run the notebooks of docs/tutorials in an empty folder, and keep what they put out."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"


def main() -> None:
    """Run one notebook after the other; what is kept has no times of cells, and names no machine."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, 4)
        with TemporaryDirectory() as folder:
            nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        notebook.metadata.pop("language_info", None)
        nbformat.write(notebook, path)
        print(f"{path.name}: {sum(len(cell.get('outputs', [])) for cell in notebook.cells)} outputs")


if __name__ == "__main__":
    main()
