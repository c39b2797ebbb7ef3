"""The site: `make docs` builds it into runs/site, without a network."""

from importlib.metadata import version as installed

project = "hpcfl"
author = "hpcfl developers"
release = version = installed("hpcfl")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["README.md", "package.md", "**.ipynb_checkpoints"]

# attributes of several classes have one name; and files outside of docs are no pages: tests/test_docs.py looks for them
suppress_warnings = ["ref.python", "myst.xref_missing"]

nb_execution_mode = "off"  # notebooks are shown as they stand; tests run them
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True}
napoleon_google_docstring = False
napoleon_numpy_docstring = True

html_theme = "furo"
html_title = f"hpcfl {release}"
html_show_sphinx = False
html_show_sourcelink = False
