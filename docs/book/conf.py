"""Sphinx's configuration of the book. helpers/lessons/book.py puts this file beside the pages that it has made."""

import importlib.util
import shutil
from pathlib import Path

project = "FlashAttention, one kernel at a time"
author = "the authors of flashattention-notebooks"
copyright = f"{author}, MIT license"
extensions = ["myst_nb"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["conf.py"]

# The notebooks have been executed; nothing is executed here.
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # else two scripts of other hosts
nb_number_source_lines = False
nb_code_prompt_show = "Show {type}"
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 4  # as GitHub and JupyterLab make them
myst_dmath_double_inline = True
suppress_warnings = [
    "misc.highlighting_failure",  # a sketch of a loop in a block of C++ has its ellipses
    "myst.header",  # a notebook's sections may begin at any level
    "mystnb.unknown_mime_type",
]
nitpicky = False

html_theme = "sphinx_book_theme"
html_title = project
language = "en"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
html_show_search_summary = False  # it would fetch the pages, which a browser forbids of files
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
mathjax_path = "mathjax/tex-svg.js"  # one file with its fonts as curves
mathjax3_config = {"options": {"enableMenu": True}, "svg": {"fontCache": "global", "scale": 0.95}}


def copy_mathjax(app, error):
    """MathJax stands beside the pages. Only what they use of it: the program and TeX's packages."""
    if error is None:
        package = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
        target = Path(app.outdir) / "_static" / "mathjax"
        shutil.copytree(
            package / "input" / "tex" / "extensions", target / "input" / "tex" / "extensions", dirs_exist_ok=True
        )
        shutil.copytree(package / "sre", target / "sre", dirs_exist_ok=True)
        shutil.copytree(package / "a11y", target / "a11y", dirs_exist_ok=True)
        shutil.copy(package / "tex-svg.js", target)


# The theme's arrows that unfold a part of the contents have no name for a screen reader, and wide tables no place for the focus.
NAMES = """addEventListener("DOMContentLoaded", () => {
  for (const arrow of document.querySelectorAll("summary:has(.toctree-toggle)"))
    arrow.setAttribute("aria-label", "pages below " + arrow.closest("li").querySelector("a").textContent.trim());
  for (const wide of document.querySelectorAll(".cell_output [style*='overflow-x']")) wide.tabIndex = 0; // arrow keys scroll it
});"""


def setup(app):
    app.add_js_file(None, body=NAMES)
    app.connect("build-finished", copy_mathjax)
