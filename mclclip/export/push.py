"""`mclclip export --to ... --push ORG/NAME`: a finished export -> a repository of a hub.

The hub is Hugging Face's, or the one that HF_ENDPOINT names. What can be known before the work is
asked before it: the client, a token, and whether the repository may be written to. A repository is
new, empty, or holds an export of mclclip; in any other one nothing is touched.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from mclclip.export import libraries, model_card
from mclclip.models.hub import one_line, quiet
from mclclip.run import artifacts
from mclclip.run.artifacts import Manifest

log = logging.getLogger("mclclip")

TARGETS = ("hf", "onnx", "timm", "llava", "open_clip")
"""Layouts that a hub holds as models; clip_retrieval is data of a run."""

_OF_THE_HUB = {".gitattributes"}
T = TypeVar("T")


@dataclass(frozen=True)
class Repository:
    """A repository that may be written to.

    name    ORG/NAME
    api     huggingface_hub's `HfApi`, or what behaves like it
    public  whether a new one is for everybody
    before  the manifest of the export that it holds, if any
    """

    name: str
    api: Any
    public: bool
    before: Manifest | None

    def upload(self, out: Path) -> None:
        """Uploads the finished export in `out`, in one commit: the files of its manifest alone, and
        none of the files of the export before that it has not.

        Raises RuntimeError where a file but the card is not what was written, or the hub refuses.
        """
        manifest = artifacts.read_manifest(out, "converted")
        manifest.check(out, *(name for name in manifest.records if name != model_card.FILE))
        names = {*manifest.records, artifacts.MANIFEST}
        older = {*(self.before.records if self.before else ())} - names

        def send() -> Any:
            self.api.create_repo(self.name, private=not self.public, exist_ok=True)
            return self.api.upload_folder(
                repo_id=self.name,
                folder_path=out,
                commit_message=f"mclclip export --to {manifest.config['to']}",
                allow_patterns=sorted(map(glob.escape, names)),
                delete_patterns=sorted(map(glob.escape, older)) or None,
            )

        done = _asked(f"{out} is finished, and {self.name} has not got it", send)
        log.info("%s has %s: %s", self.name, out, getattr(done, "commit_url", done))


def open_repository(to: str, name: str, *, public: bool = False, api: Any = None) -> Repository:
    """The repository `name`, looked at and not changed; `api` is the hub's client.

    Raises ValueError for a layout that no hub holds, a name that is none, offline, without a
    token or the package, and for a repository that has files of others or everybody reads.
    """
    if to not in TARGETS:
        raise ValueError(f"--push is of --to {', '.join(TARGETS)}, and this is --to {to}")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(f"--push is {name!r}, wanted ORG/NAME of a repository of models")
    api = _client() if api is None else api
    found = _asked(f"{name} cannot be looked at", lambda: _info(api, name))
    names = {file.rfilename for file in (found.siblings or [])} if found else set()
    if found and not found.private and not public:
        raise ValueError(
            f"--push: everybody reads {name}: give --public to publish the export there, or "
            "another name"
        )
    if found and found.private and public:
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
    return Repository(name, api, public, before)


def _client() -> Any:
    library = libraries.needed("huggingface_hub", "--push")
    if library.is_offline_mode():
        raise ValueError("--push needs the hub, and HF_HUB_OFFLINE is set: unset it")
    if not library.get_token():
        raise ValueError(
            "--push needs a token that may write: set HF_TOKEN, or run 'hf auth login' first"
        )
    return library.HfApi(library_name="mclclip")


def _info(api: Any, name: str) -> Any:
    """Returns huggingface_hub's ModelInfo of a repository; None where the token sees none."""
    from huggingface_hub.errors import RepositoryNotFoundError

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
