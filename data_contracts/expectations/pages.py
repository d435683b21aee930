"""The contract's results as pages: a summary table first, then Great Expectations' Data Docs.

Great Expectations' own pages load scripts, styles and images from a dozen sites, including a tracking pixel, and show
no
status without them. The pages written here load nothing over the network and show the status as text.
"""

import html
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.base.errors import naming
from data_contracts.expectations.suites import JudgedCheck, first_rows

_PASS, _FAIL = '<strong style="color:#176f2c">PASS</strong>', '<strong style="color:#b3261e">FAIL</strong>'
_WARN = '<strong style="color:#8a5300">WARN</strong>'
_ICONS = {"text-success": _PASS, "text-danger": _FAIL, "text-warning": _WARN}
_STRIPPED = [
    (re.compile(r"<script\b.*?</script\s*>", re.DOTALL | re.IGNORECASE), ""),
    (re.compile(r"<(link|img|iframe)\b[^>]*>", re.DOTALL | re.IGNORECASE), ""),
    (re.compile(r"@import[^;]*;"), ""),
    (re.compile(r"url\(\s*['\"]?(https?:)?//[^)]*\)"), "none"),
    (re.compile(r"href\s*=\s*([\"'])(https?:)?//.*?\1", re.DOTALL | re.IGNORECASE), 'href="#"'),
]
ALLOWED = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'\">"
)
"""The content security policy of each page: it allows the page's own styles only, and no script, whatever the data
contain."""
_HEAD = re.compile(r"<head\b[^>]*>", re.IGNORECASE)
_ICON = re.compile(r"<i class=\"[^\"]*\b(text-success|text-danger|text-warning)\b[^\"]*\"[^>]*>\s*</i>")
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.4rem .6rem;border-bottom:1px solid #ccc;"
    "vertical-align:top}td.n{text-align:right}"
)


def sanitized(page: str) -> str:
    """Return a Data Docs page that loads nothing over the network and shows its status as text."""
    page = _ICON.sub(lambda icon: _ICONS[icon.group(1)], page)
    for pattern, instead in _STRIPPED:
        page = pattern.sub(instead, page)
    return _HEAD.sub(lambda head: head[0] + ALLOWED, page, count=1)


def write_data_docs(context: Any, folder: Path, checks: Sequence[JudgedCheck], summary: Mapping[str, str]) -> None:
    """Write Data Docs of all results in `context` into `folder`, with an index page of `checks` and `summary`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder.absolute())}
    context.add_data_docs_site("tether", {"class_name": "SiteBuilder", "store_backend": store})
    with naming(folder):
        context.build_data_docs(["tether"])
        shutil.rmtree(folder / "static", ignore_errors=True)
        for page in folder.rglob("*.html"):
            page.write_text(sanitized(page.read_text(encoding="utf-8")), encoding="utf-8")
        links = sorted(page.relative_to(folder).as_posix() for page in folder.glob("validations/**/*.html"))
        (folder / "index.html").write_text(index_page(checks, summary, links), encoding="utf-8")


def index_page(checks: Sequence[JudgedCheck], summary: Mapping[str, str], links: Sequence[str]) -> str:
    """Return the index page: what was read, each check's status, row count and first row numbers, and links to Data
    Docs."""
    facts = "".join(f"<li>{html.escape(name)}: {html.escape(value)}</li>" for name, value in summary.items())
    pages = "".join(f'<li><a href="{html.escape(link)}">{html.escape(link.split("/")[1])}</a></li>' for link in links)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{ALLOWED}<title>Data contract</title>'
        f"<style>{_STYLE}</style></head><body><h1>Data contract</h1><ul>{facts}</ul>"
        "<table><thead><tr><th>Status</th><th>Check</th>"
        "<th>What it asks</th><th>Severity</th><th>Value</th><th>Threshold</th><th>Rows</th><th>First rows</th></tr>"
        "</thead><tbody>"
        f"{''.join(map(_table_row, checks))}</tbody></table><h2>Great Expectations' Data Docs</h2><ul>{pages}</ul>"
        "</body></html>\n"
    )


def _table_row(check: JudgedCheck) -> str:
    status = _PASS if check["passed"] else _FAIL if check["severity"] == "error" else _WARN
    value = "" if check["value"] is None else f"{check['value']:.3g}"
    if "interval" in check:
        value += f" ({check['interval'][0]:.3g} to {check['interval'][1]:.3g})"
    name = html.escape(f"{check['suite']}: {check['name']}")
    threshold = html.escape(", ".join(f"{end:g}" for end in np.atleast_1d(check["threshold"])))
    return (
        f"<tr><td>{status}</td><td>{name}</td><td>{html.escape(check['description'])}</td><td>{check['severity']}</td>"
        f'<td class="n">{value}</td><td class="n">{threshold}</td><td class="n">{check["rows"]}</td>'
        f"<td>{html.escape(first_rows(check))}</td></tr>"
    )
