"""Sphinx configuration of the documentation. `make docs` builds it and treats each warning as an error."""

import sys
from pathlib import Path

import lightning_fcl

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "lightning-fcl"
author = "the authors of lightning-fcl"
version = release = lightning_fcl.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    # The next three extensions are in docs/_extensions.
    # Adds a table of names at the top of the page of a package.
    "api_pages",
    # Resolves links to files of the repository outside of docs/.
    "beyond_docs",
    # Warns about built pages that request files from another host.
    "offline",
]
exclude_patterns = ["_extensions"]
show_warning_types = True

# Headings of Markdown pages are link targets, as on GitHub.
myst_heading_anchors = 3

# Each build runs the notebooks. The output on stderr is not shown.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"
nb_merge_streams = True
nb_render_markdown_format = "myst"
# Do not load the scripts of ipywidgets, because they are on another host.
nb_ipywidgets_js = {}

# Docstrings have Google style. Single backticks are references to Python objects of the package.
default_role = "py:obj"
napoleon_numpy_docstring = False
# Hooks of Lightning that are overridden without a docstring are not documented.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
# Generate no pages for the API. All its pages are in docs/api.
autosummary_generate = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "lightning-fcl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["sort.js"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"
