"""Settings of the documentation: `make docs` builds it, where each warning is an error."""

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
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "beyond_docs",  # ours: links to files of the repository that are not below docs/
    "offline",  # ours: a built page that asks another host for anything is a warning
]
exclude_patterns = ["_extensions"]
show_warning_types = True

# Markdown. Headings are link targets, as on GitHub.
myst_heading_anchors = 3
suppress_warnings = []

# Notebooks run anew in each build; what one prints on stderr is no part of it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"
nb_ipywidgets_js = {}  # its scripts would come from another host

# Docstrings: google style, single backticks name our own objects.
default_role = "py:obj"
napoleon_numpy_docstring = False
autodoc_inherit_docstrings = False  # hooks of Lightning that we override without a word
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "lightning-fcl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"
