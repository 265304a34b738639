"""Shards behind urls: the same samples as from a disk, and faults that are never taken for data."""

from __future__ import annotations

import os
import random
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import obstore
import pytest
import torch

from mclclip import config
from mclclip.data import remote as remote_module
from mclclip.data.loader import Loader
from mclclip.data.options import DataConfig
from mclclip.data.remote import (
    GAP_BYTES,
    ChangedShard,
    Remote,
    RemoteOptions,
    StoredFile,
    check_protocol,
    open_whole,
)
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset
from mclclip.data.shard_paths import expand_shards
from mclclip.data.shard_reader import ShardReader
from mclclip.ranks.process_group import SINGLE
from mclclip.util.remake import Remake
from mclclip.verbs import index
from tests import forks
from tests.hub_server import hub
from tests.shard_server import Handler, ShardServer, s3_bucket, serving
from tests.tars import write_tar
from tests.unit.data.test_samples import make_index, to_tensor, tokenize
from tests.unit.test_index import all_keys, make_shard
from tests.unit.test_index import run as run_index

DATA = random.Random(0).randbytes(3 * GAP_BYTES + 12_345)
FAST = RemoteOptions(retries=2, timeout_s=60.0)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,127.0.0.2,localhost")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.tar").write_bytes(DATA)
    with serving(folder) as started:
        yield started


def stat(server: ShardServer, name: str = "a.tar") -> StoredFile:
    (found,) = Remote(FAST).stat([server.url(name)])
    assert found is not None
    return found


def ranges(server: ShardServer, number: int = 40, tag: str = "") -> list[tuple[str, int, int, str]]:
    rng = random.Random(1)
    starts = [rng.randrange(len(DATA) - 1) for _ in range(number)]
    url = server.url("a.tar")
    return [(url, s, rng.randint(0, min(5000, len(DATA) - s)), tag) for s in starts]


def read(remote: Remote, asked: list[tuple[str, int, int, str]]) -> None:
    found = remote.read_ranges(asked)
    assert found == [DATA[start : start + size] for _, start, size, _ in asked]


def test_neighbours_come_by_one_request_of_an_upper_size(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions with the pictures between them too."""
    url = server.url("a.tar")
    read(Remote(FAST), [(url, 100, 10, ""), (url, 0, 10, ""), (url, 110 + GAP_BYTES, 7, "")])
    assert server.seen["GET"] == 1
    read(Remote(FAST), [(url, 0, 10, ""), (url, 11 + GAP_BYTES, 10, "")])
    assert server.seen["GET"] == 3
    read(Remote(FAST), [(url, at, 100, "") for at in range(0, len(DATA) - 100, 30_000)])
    assert server.seen["GET"] == 4
    monkeypatch.setattr(remote_module, "BLOCK_BYTES", 1000)
    read(Remote(FAST), [(url, at, 100, "") for at in range(0, 3000, 100)])
    assert server.seen["GET"] == 7
    read(Remote(FAST), [(url, 0, 1500, ""), (url, 700, 800, ""), (url, 1500, 10, "")])
    assert server.seen["GET"] == 9


@pytest.mark.parametrize("fault", ["fail", "cut"])
def test_what_passes_is_tried_again(server: ShardServer, fault: str) -> None:
    setattr(server, fault, 1)
    read(Remote(FAST), ranges(server))
    assert server.takes(fault) is False


def test_a_shard_that_stays_dead_is_one_error_that_names_it(server: ShardServer) -> None:
    server.fail, server.status = -1, 429
    with pytest.raises(OSError, match=r"a\.tar .*429"):
        Remote(RemoteOptions(retries=1)).read_ranges(ranges(server, 1))
    assert server.seen["GET"] == 2


def test_a_server_that_is_silent_or_gone_is_not_waited_for_without_end(
    server: ShardServer, tmp_path: Path
) -> None:
    server.silent = True
    impatient = Remote(RemoteOptions(retries=1, timeout_s=0.1))
    with pytest.raises(OSError, match=r"a\.tar"):
        impatient.read_ranges(ranges(server, 1))
    with serving(tmp_path) as other:
        url = other.url("x.tar")
    for call in (impatient.stat, lambda urls: impatient.read_ranges([(urls[0], 0, 9, "")])):
        with pytest.raises(OSError, match=r"x\.tar"):
            call([url])


def test_errors_that_no_attempt_mends_are_not_tried_again(server: ShardServer) -> None:
    missing = server.url("b.tar")
    with pytest.raises(FileNotFoundError, match=r"b\.tar"):
        Remote(FAST).stat([missing])
    with pytest.raises(FileNotFoundError, match=r"b\.tar"):
        Remote(FAST).read_ranges([(missing, 0, 5, "")])
    server.fail, server.status = 1, 403
    with pytest.raises(PermissionError, match=r"a\.tar"):
        Remote(FAST).read_ranges(ranges(server, 1))
    server.ranges = False
    for call in (stat, lambda server: Remote(FAST).read_ranges(ranges(server, 1))):
        with pytest.raises(OSError, match="does not serve ranges"):
            call(server)
    assert server.seen["GET"] == 5


def test_another_object_behind_a_url_is_never_read(server: ShardServer, tmp_path: Path) -> None:
    was = stat(server)
    (server.folder / "a.tar").write_bytes(DATA[::-1])
    with pytest.raises(ChangedShard, match=r"a\.tar"):
        Remote(FAST).read_ranges(ranges(server, tag=was.tag))
    with pytest.raises(ChangedShard), open(tmp_path / "copy", "wb") as copy:
        Remote(FAST).fetch(was, copy)


def test_where_there_is_no_etag_the_time_of_change_is_compared(server: ShardServer) -> None:
    server.times_only = True
    was = stat(server)
    read(Remote(FAST), ranges(server, tag=was.tag))
    (server.folder / "a.tar").write_bytes(DATA[::-1])
    later = datetime.fromisoformat(was.tag).timestamp() + 2
    os.utime(server.folder / "a.tar", (later, later))
    with pytest.raises(ChangedShard, match=r"a\.tar"):
        Remote(FAST).read_ranges(ranges(server, tag=was.tag))


def test_a_server_without_etags_is_read_and_a_shorter_object_refused(server: ShardServer) -> None:
    server.tags = False
    read(Remote(FAST), ranges(server, tag=stat(server).tag))
    (server.folder / "a.tar").write_bytes(DATA[:100])
    with pytest.raises(OSError, match=r"a\.tar"):
        Remote(FAST).read_ranges([(server.url("a.tar"), 50, 100, "")])


@pytest.mark.parametrize("block_bytes", [len(DATA) // 3, len(DATA) - 1, len(DATA)])
def test_a_whole_shard_comes_in_blocks(
    server: ShardServer, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "BLOCK_BYTES", block_bytes)
    server.cut = 1
    with open_whole(stat(server), Remote(FAST)) as file:
        assert file.read() == DATA


def test_other_urls_are_refused() -> None:
    for url in (
        "ftp://b/a.tar", "file:///etc/passwd", "pipe:cat a", "hf://datasets/ORG/NAME",
        "s3://bucket/a?.tar", "gs://bucket/[ab]*.tar", "https://host/a b.tar?sig=SECRET",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^data\.sources\.x\.shards") as caught:
            check_protocol(url, "data.sources.x.shards")
        assert "SECRET" not in str(caught.value)
    with pytest.raises(ValueError, match="HTTP has no listings: use braces"):
        expand_shards("https://x.org/*.tar", "o")


@pytest.mark.parametrize("user", ["me:s3cret@", "s3cret@", ":s3cret@"])
def test_secrets_are_neither_taken_nor_shown(user: str, server: ShardServer) -> None:
    for url in (f"https://{user}host/a.tar", f"ftp://{user}host/a.tar?s3cret"):
        with pytest.raises(ValueError) as raised:
            expand_shards(url, "data.sources.x.shards")
        assert "s3cret" not in str(raised.value) and "host/a.tar" in str(raised.value)
    signed = server.url("b.tar?signature=s3cret")
    with pytest.raises(FileNotFoundError) as gone:
        Remote(FAST).stat([signed])
    assert "s3cret" not in str(gone.value) and "b.tar?..." in str(gone.value)


def test_a_signed_url_keeps_its_query_and_needs_no_head(server: ShardServer) -> None:
    asked: list[str] = []

    def answer(handler: Handler) -> object:
        asked.append(handler.path)
        return handler.command == "HEAD" and handler.send(403, b"", False)

    server.answer = answer
    name = "a.tar?X-Sig=a%2Fb%3D&z=%20+&e="
    (stored,) = Remote(FAST).stat([server.url(name)])
    assert stored is not None and stored.size == len(DATA)
    read(Remote(FAST), [(stored.path, 7, 9, stored.tag)])
    assert asked == [f"/{name}"] * 2


PAGE = b"<html>sign in</html>".ljust(20_480, b" ")
ANSWERS: dict[str, Callable[[Handler], object]] = {
    "html": lambda h: h.send(200, PAGE, h.command == "GET"),
    "loop": lambda h: h.send(301, b"", Location=h.path + "&s3cret"),
    "elsewhere": lambda h: h.send(302, b"", Location="http://127.0.0.1:9/a.tar?s3cret"),
    "odd target": lambda h: h.send(302, b"", Location="ftp://me:s3cret@h/a.tar?s3cret"),
    "garbage": lambda h: h.wfile.write(b"garbage /a.tar?s3cret\r\n\r\n"),
}
BAD: dict[str, Callable[[ShardServer], object]] = {
    **{
        name: lambda server, answer=answer: setattr(server, "answer", answer)
        for name, answer in ANSWERS.items()
    },
    "denied": lambda server: vars(server).update(fail=-1, status=403),
    "cut": lambda server: setattr(server, "cut", -1),
    "gone": lambda server: (server.folder / "0.tar").unlink(),
    "torn": lambda server: (server.folder / "0.tar").write_bytes(b"no tar" * 200),
    "replaced": lambda server: make_shard(server.folder / "0.tar", "c", "d"),
}


def told(call: Callable[[], object]) -> str:
    """The traceback of what a call raises, with all causes."""
    try:
        call()
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


@pytest.mark.parametrize("fault", list(BAD))
def test_no_message_about_a_bad_shard_holds_the_secret_of_its_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.set_level("DEBUG", "mclclip")
    folder = tmp_path / "served"
    make_shard(folder / "0.tar", "a", "b")

    def indexed(name: str) -> SampleIndex:
        sources = {"s": {"shards": url}}
        data = {"sources": sources, "max_bad_fraction": 1.0, "remote": {"retries": 0}}
        tree = {"run_dir": str(tmp_path / name), "data": data}
        return index.run(config.from_tree(tree), SINGLE)

    with serving(folder) as server:
        url = server.url("0.tar?me=1&signature=s3cret")
        found = indexed("run")
        served = TarDataset(found, DataConfig(remote=RemoteOptions(retries=0)), to_tensor)
        BAD[fault](server)
        fresh = told(lambda: indexed("fresh"))
        known = told(lambda: indexed("run"))
        reading = told(lambda: served.read_many([0, 1]))
    assert "0.tar?..." in fresh or "0.tar?..." in caplog.text or fault == "replaced"
    assert "s3cret" not in fresh + known + reading + caplog.text
    held = [path.name for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in
            path.read_bytes()]  # fmt: skip
    assert set(held) == {"shards.json"}


def test_files_of_the_hub_are_listed_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub" / "pixparse" / "cc12m-wds"
    for name in ("train-0000.tar", "train-0001.tar", "data/train-0002.tar", "README.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(DATA)
    base = "hf://datasets/pixparse/cc12m-wds@main"
    with hub(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url("").rstrip("/"))
        top = [f"{base}/train-0000.tar", f"{base}/train-0001.tar"]
        assert expand_shards(f"{base}/*.tar", "o") == top
        assert expand_shards(f"{base}/**.tar", "o") == [f"{base}/data/train-0002.tar", *top]
        (stored,) = Remote(FAST).stat(top[:1])
        assert stored is not None and stored.size == len(DATA)
        read(Remote(FAST), [(top[0], 100, 50, stored.tag)])
        with pytest.raises(FileNotFoundError, match="match no file"):
            expand_shards(f"{base}/*.zip", "o")
        with pytest.raises(FileNotFoundError, match="no/such"):
            expand_shards("hf://datasets/no/such/*.tar", "o")
        monkeypatch.setattr(remote_module, "MOST_LISTED", 4)
        with pytest.raises(ValueError, match="use braces"):
            expand_shards(f"{base}/*.tar", "o")


# --- credentials ---------------------------------------------------------------------------------


def test_a_file_of_logins_that_cannot_be_read_is_named(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00machine")
    for logins in (tmp_path, binary):
        monkeypatch.setenv("NETRC", str(logins))
        with pytest.raises(RuntimeError, match=str(logins)):
            Remote(FAST).stat([server.url("a.tar")])


@pytest.mark.parametrize("url", ["http", "hf"])
def test_credentials_are_sent_to_the_host_of_the_url_and_not_to_where_it_redirects(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password s3cret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    monkeypatch.setenv("HF_ENDPOINT", server.url("").rstrip("/"))
    asked: list[str] = []
    with serving(server.folder, "127.0.0.2") as other:
        target = other.url("a.tar?signature=x%2F1")
        server.answer = lambda handler: (
            asked.append(handler.path),
            handler.send(302, b"", Location=target),
        )
        other.answer = lambda handler: (asked.append(handler.path), False)[1]
        address = server.url("a.tar") if url == "http" else "hf://datasets/ORG/NAME@v1/x/a.tar"
        (stored,) = Remote(FAST).stat([address])
        assert stored is not None
        read(Remote(FAST), [(address, 100, 50, stored.tag)])
        assert {head["Authorization"] for _, head in other.headers} == {None}
    login = "Basic " + b64encode(b"me:s3cret").decode()
    header = login if url == "http" else "Bearer hf_s3cret"
    assert {head["Authorization"] for _, head in server.headers} == {header}
    first = "/a.tar" if url == "http" else "/datasets/ORG/NAME/resolve/v1/x/a.tar"
    assert asked == [first, "/a.tar?signature=x%2F1"] * 2


# --- as a data set -----------------------------------------------------------------------------


def test_samples_are_those_on_disk_under_faults_and_a_fork_is_refused(tmp_path: Path) -> None:
    """Of workers that are started anew, since the connections of this process must not be theirs:
    a forked child is refused, and does not hang."""
    samples = make_index(tmp_path)
    local = TarDataset(samples, DataConfig(), to_tensor, tokenizer=tokenize)
    ids = torch.randperm(len(local), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [ids[start : start + 7] for start in range(0, len(ids), 7)]
    with serving(tmp_path / "shards") as server:
        over_urls = DataConfig(remote=RemoteOptions(retries=4, timeout_s=60.0))
        served = TarDataset(samples, over_urls, to_tensor, tokenizer=tokenize)
        files = [stat(server, Path(shard.path).name) for shard in samples.shards]
        served.bytes.reader = ShardReader(files, over_urls)
        assert served.bytes.captions_of(ids) == local.bytes.captions_of(ids)

        def read_in_fork() -> None:
            with pytest.raises(RuntimeError):
                Remote(FAST).stat([files[0].path])

        assert forks.exit_code(read_in_fork) == 0
        server.fail, server.cut = 1, 1
        loader: Loader[list[Sample]] = Loader(
            served, batches, num_workers=1, describe=lambda *_: "batch", collate=list, fresh=True,
            timeout_s=300.0,
        )  # fmt: skip
        for asked, found in zip(batches, loader, strict=True):
            for wanted, sample in zip(local.__getitems__(asked), found, strict=True):
                assert isinstance(wanted, Sample) and isinstance(sample, Sample)
                assert wanted.sample_id == sample.sample_id
                assert torch.equal(wanted.views[0], sample.views[0])
                assert wanted.text is not None and sample.text is not None
                assert torch.equal(wanted.text, sample.text)
        assert not server.takes("fail") and not server.takes("cut")
        assert served.bytes.captions_of(ids) == local.bytes.captions_of(ids)


def test_keys_that_start_again_name_no_secret_of_a_signed_url(
    server: ShardServer, tmp_path: Path
) -> None:
    for name in "ab":
        write_tar(server.folder / f"{name}.tar", [("0.jpg", name.encode()), ("0.txt", b"x")])
    urls = [server.url(f"{name}.tar?signature=s3cret") for name in "ab"]
    assert all_keys(run_index(tmp_path / "run", s=urls)) == ["s/a/0", "s/b/0"]


def test_the_index_remembers_what_a_url_was(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    make_shard(folder / "0.tar", "a", "b")
    make_shard(folder / "1.tar", "c")
    with serving(folder) as server:
        server.fail = 1
        urls = server.url("{0..1}.tar")
        found = run_index(tmp_path / "run", s=urls, workers=2)
        assert all_keys(found) == ["s/a", "s/b", "s/c"]
        assert [shard.tag for shard in found.shards] == [
            stat(server, "0.tar").tag,
            stat(server, "1.tar").tag,
        ]
        run_index(tmp_path / "run", s=urls)
        make_shard(folder / "1.tar", "d")
        with pytest.raises(ValueError, match=r"1\.tar .* when it was indexed.* index --force"):
            run_index(tmp_path / "run", s=urls)
        assert all_keys(run_index(tmp_path / "run", s=urls, force=Remake.ALL))[-1] == "s/d"
        (folder / "0.tar").unlink()
        for shards in (urls, server.url("1.tar")):
            with pytest.raises(FileNotFoundError, match=r"0\.tar is not there"):
                run_index(tmp_path / "run", s=shards)


def test_what_was_begun_is_taken_by_who_asks_for_the_same(server: ShardServer) -> None:
    reader = ShardReader([stat(server)], DataConfig(remote=FAST))
    ranges, far = [(0, 0, 100), (0, 200, 100)], [(0, 900, 10)]
    reader.start_prefetch(ranges)
    reader.prefetch(far)  # something else, which a replaced sample needs meanwhile
    assert reader.read(*far[0]) == DATA[900:910]
    reader.prefetch(ranges)
    before = server.seen["GET"]
    assert [reader.read(*r) for r in ranges] == [DATA[:100], DATA[200:300]]
    assert server.seen["GET"] == before == 3  # with the first look
    server.fail, server.status = -1, 404  # what goes wrong meanwhile is told when it is asked for
    reader.start_prefetch(ranges)
    reader.prefetch(ranges)
    with pytest.raises(FileNotFoundError, match=r"a\.tar is not there: put it back"):
        reader.read(*ranges[0])
    server.fail = 0
    reader.prefetch(ranges)
    assert reader.read(*ranges[0]) == DATA[:100]


# --- object stores -------------------------------------------------------------------------------


def test_s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with s3_bucket(monkeypatch) as bucket:
        root = f"s3://{bucket.name}"
        for name, keys in (("train/0.tar", "ab"), ("train/1.tar", "c"), ("train/x/2.tar", "d")):
            bucket.upload_file(str(make_shard(local / name, *keys)), name)
        found = run_index(tmp_path / "run", s=f"{root}/train/*.tar")
        assert all_keys(found) == ["s/a", "s/b", "s/c"]
        assert [shard.path for shard in found.shards] == [f"{root}/train/{n}.tar" for n in (0, 1)]
        assert len(expand_shards(f"{root}/**.tar", "o")) == 3
        assert expand_shards(f"{root}/*/1.tar", "o") == [f"{root}/train/1.tar"]
        with monkeypatch.context() as shallow:  # one folder is not listed with all below it
            shallow.delattr(obstore, "list")
            assert len(expand_shards(f"{root}/train/*.tar", "o")) == 2
        files = [shard.stored for shard in found.shards]
        reader = ShardReader(files, DataConfig(remote=FAST))
        for number, name in enumerate(("train/0.tar", "train/1.tar")):
            data = (local / name).read_bytes()
            assert reader.read(number, 512, 700) == data[512 : 512 + 700]
        bucket.upload_file(str(make_shard(local / "1.tar", "d")), "train/1.tar")
        with pytest.raises(ValueError, match=r"1\.tar"):
            run_index(tmp_path / "run", s=f"{root}/train/*.tar")
        with pytest.raises(ChangedShard, match=r"1\.tar"):
            reader.read(1, 0, 512)
        with pytest.raises(FileNotFoundError, match=r"9\.tar"):
            Remote(FAST).stat([f"{root}/train/9.tar"])
        with pytest.raises(FileNotFoundError, match="match no file"):
            run_index(tmp_path / "other", s=f"{root}/nothing/*.tar")


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_google_and_azure_are_read_as_their_libraries_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Of a server that answers as they do to a read; it lists nothing and checks no signature."""
    folder = tmp_path / ("account/bucket" if protocol == "az" else "bucket")
    make_shard(folder / "0.tar", "a", "b")
    with serving(tmp_path) as server:
        address = server.url("").rstrip("/")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{address}/account")
        monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
        monkeypatch.setenv("GOOGLE_BASE_URL", address)
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        url = f"{protocol}://bucket/0.tar"
        found = run_index(tmp_path / "run", s=url)
        assert all_keys(found) == ["s/a", "s/b"] and found.shards[0].tag.startswith('"')
        reader = ShardReader([found.shards[0].stored], DataConfig(remote=FAST))
        assert reader.read(0, 512, 700) == (folder / "0.tar").read_bytes()[512 : 512 + 700]
        make_shard(folder / "0.tar", "c", "d")
        with pytest.raises(ChangedShard, match=r"0\.tar"):
            reader.read(0, 0, 512)
