"""Opens the object stores behind urls; obstore reads and writes them.

Credentials come from the environment variables that obstore documents (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``, ...), for
HTTP from ``~/.netrc``, and for ``hf://`` from ``HF_TOKEN`` or ``hf auth login``. They are not sent
to another host on a redirect.

obstore's threads do not survive a fork: a forked child that used them would hang together with its
parent. So `open_store` refuses a process that was forked after its parent had used obstore, and a
loader that reads urls starts its workers as new processes instead of forking them.
"""

from __future__ import annotations

import netrc
import os
import re
from base64 import b64encode
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore.store
from huggingface_hub import get_token

from mclclip.util.files import printable
from mclclip.util.options import protocol_of

_MOST_STORES = 4096  # so many stores stay open; each bucket, host and signature has its own
_HUB = r"hf://datasets/([^/@?]+/[^/@?]+)(?:@([^/?]+))?"
HUB_URL = re.compile(f"{_HUB}/([^?]+)")
_opened_by: list[int] = []  # the number of the first process that has used obstore


def open_store(url: str, retries: int, timeout_s: float) -> tuple[Any, str]:
    """Returns obstore's store for a url, and the path of the object in the store.

    A data set of the hub without a file, 'hf://datasets/ORG/NAME', is the hub's description of it.
    A store keeps its connections open; urls of the same bucket, or the same host and query, share
    one. Raises RuntimeError in a process that was forked after its parent had opened stores.
    """
    _check_process()
    header = ""
    if hub := re.match(f"{_HUB}(?:/([^?]+))?", url):
        name, revision, file = hub[1], hub[2] or "main", hub[3]
        host = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        url = f"{host}/api/datasets/{name}/revision/{revision}"
        url = f"{host}/datasets/{name}/resolve/{revision}/{file}" if file else url
        header = f"Bearer {token}" if (token := get_token()) else ""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        base, path = f"{parts.scheme}://{parts.netloc}", url.split("/", 3)[3:]
        return _open(base, "", retries, timeout_s), "".join(path)
    base = f"{parts.scheme}://{parts.netloc}/" + (f"?{parts.query}" if parts.query else "")
    header = header or _login_of(parts.hostname or "")
    return _open(base, header, retries, timeout_s), unquote(parts.path[1:])


def open_folder(url: str, retries: int, timeout_s: float) -> Any:
    """Returns obstore's store for a folder: a path, which is created if it is missing, or a url.

    Names of objects are relative to the folder. Raises as `open_store` does, and obstore's error if
    the folder cannot be created.
    """
    _check_process()
    if protocol_of(url) is None:
        folder = Path(url).expanduser().absolute()
        return obstore.store.LocalStore(folder, mkdir=True, automatic_cleanup=True)
    return _open(url, "", retries, timeout_s)


def _check_process() -> None:
    if not _opened_by:
        _opened_by.append(os.getpid())
    if _opened_by[0] != os.getpid():
        raise RuntimeError("urls are read in a process that was forked from one that has read some")


@lru_cache(_MOST_STORES)
def _open(base: str, header: str, retries: int, timeout_s: float) -> Any:
    client: dict[str, Any] = {
        # http is used only if the user's url has it: an https url is not redirected to http.
        "allow_http": not base.startswith("https:"),
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=timeout_s),
    }
    if header:
        client["default_headers"] = {"authorization": header}
    pauses = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10)}
    longest = timedelta(seconds=(retries + 1) * (timeout_s + 10))
    retry = {"max_retries": retries, "retry_timeout": longest, "backoff": {**pauses, "base": 2}}
    from_url: Any = obstore.store.from_url
    return from_url(base, client_options=client, retry_config=retry)


def _login_of(host: str) -> str:
    """The authorization header by the login in ``~/.netrc`` (or ``$NETRC``); empty without one."""
    try:
        login = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except FileNotFoundError:
        return ""
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError) as error:
        line = f"line {error.lineno}" if isinstance(error, netrc.NetrcParseError) else error
        file = os.environ.get("NETRC", "~/.netrc")
        raise RuntimeError(f"{file} with logins cannot be read ({line}): correct it") from None
    if login is None:
        return ""
    return "Basic " + b64encode(f"{login[0]}:{login[2]}".encode()).decode()


def reason_of(error: Exception) -> str:
    """Describes an error of obstore in a few words, without text from the server or the url."""
    text = str(error)
    if status := re.search(r"status code: (\d+[\w -]*)", text):
        return f"HTTP status {status[1].strip()}"
    if kind := re.search(r"HttpError \{\s*kind: (\w+)", text):
        about_redirects = "redirect" in text.partition("\n")[0]
        return "too many redirects" if about_redirects else f"HTTP error: {kind[1]}"
    line = text.partition("\n")[0].partition(": Error performing")[0]
    return printable(re.sub(r"\S*[?&#=]\S*", "...", line))[:200] or type(error).__name__
