"""The page at `/`: one file without outside assets, and a policy that lets the browser load and run nothing else."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.responses import HTMLResponse


def page_response() -> HTMLResponse:
    """Returns the page; its policy names the digests of its own style and script."""
    html = files("selfspec.serve").joinpath("page.html").read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "style-src": _digest("style", html),
        "script-src": _digest("script", html),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


def _digest(tag: str, html: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
