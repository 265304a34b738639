"""`mclclip export --to ... --push ORG/NAME`: a finished export -> a repository of a hub.

The hub is Hugging Face's, or the one that HF_ENDPOINT names. What can be known before the work is
asked before it: a token, and whether the repository may be written to. A repository is new, empty,
or holds an export of mclclip; in any other one nothing is touched.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub.errors import RepositoryNotFoundError

from mclclip.export import model_card, targets
from mclclip.models.hub import one_line, quiet
from mclclip.run import artifacts
from mclclip.run.artifacts import Manifest

log = logging.getLogger("mclclip")

_OF_THE_HUB = {".gitattributes"}
T = TypeVar("T")


def open_repository(
    to: str, name: str, *, public: bool = False, api: Any = None
) -> Callable[[Path], None]:
    """Looks at the repository `name` and changes nothing; returns a function that uploads the
    finished export in a folder there. `api` is the hub's client; a new repository is for everybody
    if `public`.

    Raises ValueError for a layout that no hub holds, a name that is none, offline, without a token,
    and for a repository that has files of others or everybody reads. What it returns raises
    RuntimeError where a file but the card is not what was written, or the hub refuses.
    """
    if not targets.find(to).IS_MODEL:
        models = [other for other in targets.names() if targets.find(other).IS_MODEL]
        raise ValueError(f"--push is of --to {', '.join(models)}, and this is --to {to}")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(f"--push is {name!r}, wanted ORG/NAME of a repository of models")
    api = _client() if api is None else api
    info = _asked(f"{name} cannot be looked at", lambda: _info(api, name))
    names = {file.rfilename for file in (info.siblings or [])} if info else set()
    if info and not info.private and not public:
        raise ValueError(
            f"--push: everybody reads {name}: give --public to publish the export there, or "
            "another name"
        )
    if info and info.private and public:
        log.warning("%s is private and stays so: change it in its settings on the hub", name)
    before = _export_in(api, name) if artifacts.MANIFEST in names else None
    if before is None and names - _OF_THE_HUB:
        first = sorted(names - _OF_THE_HUB)[0]
        raise ValueError(
            f"--push: {name} holds files that mclclip did not write, such as {first}: give a new "
            "name, or remove them there"
        )
    if before is not None:
        log.info(
            "%s holds an export to %s of %s, which the new one takes the place of; its history "
            "keeps it", name, before.config.get("to"), before.finished,
        )  # fmt: skip
    records = {*before.records} if before is not None else set()
    return lambda out: _upload(api, name, out, public, records)


def _upload(api: Any, name: str, out: Path, public: bool, before: set[str]) -> None:
    """Uploads the export in `out` in one commit: the files of its manifest alone, and none of the
    files `before` of the export that the repository held which it has not."""
    manifest = artifacts.read_manifest(out, "converted")
    manifest.check(out, *(file for file in manifest.records if file != model_card.FILE))
    names = {*manifest.records, artifacts.MANIFEST}

    def send() -> Any:
        api.create_repo(name, private=not public, exist_ok=True)
        return api.upload_folder(
            repo_id=name,
            folder_path=out,
            commit_message=f"mclclip export --to {manifest.config['to']}",
            allow_patterns=sorted(map(glob.escape, names)),
            delete_patterns=sorted(map(glob.escape, before - names)) or None,
        )

    done = _asked(f"{out} is finished, and {name} has not got it", send)
    log.info("%s has %s: %s", name, out, getattr(done, "commit_url", done))


def _client() -> Any:
    if huggingface_hub.is_offline_mode():
        raise ValueError("--push needs the hub, and HF_HUB_OFFLINE is set: unset it")
    if not huggingface_hub.get_token():
        raise ValueError(
            "--push needs a token that may write: set HF_TOKEN, or run 'hf auth login' first"
        )
    return huggingface_hub.HfApi(library_name="mclclip")


def _info(api: Any, name: str) -> Any:
    """huggingface_hub's ModelInfo of a repository; None where the token sees none."""
    try:
        return api.model_info(name)
    except RepositoryNotFoundError:
        return None


def _export_in(api: Any, name: str) -> Manifest | None:
    """The manifest of the export in a repository; None where its manifest is another program's."""
    with TemporaryDirectory() as folder:
        _asked(
            f"{name} cannot be read",
            lambda: api.hf_hub_download(name, artifacts.MANIFEST, local_dir=folder),
        )
        try:
            return artifacts.read_manifest(Path(folder), "converted")
        except ValueError:
            return None


def _asked(what: str, ask: Callable[[], T]) -> T:
    """Calls the hub quietly. Raises RuntimeError, one line that begins with `what`, if it fails."""
    try:
        with quiet():
            return ask()
    except Exception as error:  # the client raises dozens of kinds of errors
        raise RuntimeError(
            f"{what} ({one_line(error)}): see to the token's rights and the network, then give the "
            "same command again"
        ) from error
