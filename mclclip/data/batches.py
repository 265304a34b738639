"""Makes this rank's `Batch` of a step: reads, augments and, where needed, replaces the samples.

Everything here is a pure function of (data, plan, seed, stage, step, columns). A rank, a loader
worker or a resumed process computes the same sample in the same column as a single process does.

This is how samples that cannot be used are replaced. Let sample x, in column p of the global batch,
be undecodable, and let positions count along ``GroupedIndex.sample_ids`` (sorted by label). Only
the samples at positions q = p modulo global_batch may replace it. They are tried group by group:
first the group of x, then all groups whose labels share a prefix with that of x, with ever shorter
prefixes, and at last the whole index. Within a group the search starts at an offset hashed from
(seed, epoch, x), goes upwards and wraps around at the group's end. It skips samples that the plan
put into this global batch, known bad samples and undecodable ones. The first sample that remains
takes the column, with its own label truncated at the step's prefix length.

Two columns never share such a candidate. So replacements cannot collide, on whichever ranks and in
whichever order they are made, and ranks need not communicate. Since planned samples are skipped, a
global batch without repeated samples stays one. Only where a batch holds a large part of the data
may none remain in a column: then any other sample takes it, which two bad ones may share. A known
bad sample is skipped with the same result as one that fails to decode, so a resumed run, which
knows more of them, makes the same batches.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from mclclip.data.bytes import BadSample, RawSample
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.labels import AttributeClasses, ClassLabels, truncate
from mclclip.data.options import SentencesConfig
from mclclip.data.picture_transform import PictureTransform
from mclclip.data.samples import Sample, TarDataset, draw_sentences
from mclclip.util.randomness import mix

Integers = npt.NDArray[np.int64]
Ids = Integers | Sequence[int]
# Each kind of random draw has its own number in the key, so that draws are independent.
_AUGMENTATION, _CAPTION, _REPLACEMENT, _EXTRAS, _SENTENCES = (
    int.from_bytes(word, "big")
    for word in (b"augment", b"caption", b"replace", b"extras", b"sentence")
)
T = TypeVar("T")
log = logging.getLogger("mclclip")
_FEW_BYTES = 2**18  # up to here, a pipe is faster than making a shared memory


@dataclass
class Batch:
    """One rank's columns of one global batch; b = global_batch / world_size.

    views          one or more [b, C, H, W]: the images, transformed once for each view; float32
                   and normalised, or uint8 if the device is to normalise them. Where rows on disk
                   stand for images, [b, ...], float16 or float32
    text           tokens int64 [b, context], or rows float32 [b, W] of the user that stand for
                   them (``text_rows``); None: captions are not read, or have text_features
    text_features  float32 [b, D] text embeddings from disk, or None
    group_ids      int64 [b, 1], the pseudo label of each sample, truncated at the step's prefix
                   length; the mask of Eq. 3 keeps pairs whose group ids are equal
    classes        int64 [b, l], the classes of which a sample is a positive (-1: none), or None;
                   always in main memory, where objectives sort and count them
    sample_id      int64 [b]
    step           step of the stage, counted over all its epochs
    prefix_length  number of leading stages whose cluster labels are compared (`PlannedBatch`)
    group_size     samples that a row is compared with over all ranks (`PlannedBatch.group_size`)
    replaced       {id of a sample of this rank that could not be used: reason}
    extras         more tensors [b, ...] by name, which the objective reads (`samples.Extra`)
    """

    views: list[Tensor]
    group_ids: Tensor
    sample_id: Tensor
    step: int
    group_size: int
    prefix_length: int = 0
    text: Tensor | None = None
    text_features: Tensor | None = None
    classes: Tensor | None = None
    replaced: dict[int, str] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sample_id)

    def slice(self, start: int, stop: int) -> Batch:
        """Returns the batch of its samples [start, stop)."""
        return self._each_tensor(lambda tensor: tensor[start:stop])

    def pin_memory(self) -> Batch:
        """Copies the batch to page-locked memory; DataLoader(pin_memory=True) calls this."""
        return self._each_tensor(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str) -> Batch:
        """Copies the batch from main memory to ``device``, except ``classes``, which stay.

        The copies run in the background if the batch is pinned; work on the device waits for them.
        """
        classes = self.classes
        return self._each_tensor(
            lambda tensor: tensor if tensor is classes else tensor.to(device, non_blocking=True)
        )

    def tensors(self) -> list[Tensor]:
        """Returns every tensor of the batch, including the views and the extras."""
        fields = (v for v in vars(self).values() if isinstance(v, Tensor))
        return [*self.views, *fields, *self.extras.values()]

    def _each_tensor(self, change: Callable[[Tensor], Tensor]) -> Batch:
        fields: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        extras = {name: change(tensor) for name, tensor in self.extras.items()}
        return replace(self, **fields, views=[change(view) for view in self.views], extras=extras)


def _reduce_batch(batch: Batch) -> tuple[Callable[..., Batch], tuple[dict[str, Any]]]:
    """Pickles a batch of a loader's worker, with small tensors as arrays."""
    state = {name: _small_as_array(value) for name, value in vars(batch).items()}
    state["extras"] = {name: _small_as_array(tensor) for name, tensor in batch.extras.items()}
    return _rebuild_batch, (state,)


def _small_as_array(value: Any) -> Any:
    if isinstance(value, Tensor) and value.nbytes <= _FEW_BYTES:
        return value if value.is_shared() else value.numpy()  # type: ignore[no-untyped-call]
    return value


def _rebuild_batch(state: dict[str, Any]) -> Batch:
    for values in (state, state["extras"]):
        values |= {n: torch.from_numpy(v) for n, v in values.items() if isinstance(v, np.ndarray)}
    return Batch(**state)


# Workers send large tensors, such as the views, in shared memory, and small ones within the
# message, since each piece of shared memory costs the two processes 0.4 ms.
ForkingPickler.register(Batch, _reduce_batch)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restores the global CPU generators (torch, random, numpy) after the block.

    That takes 80 us, most of it for numpy's, so it is done once for many samples.
    """
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def seed_generators(key: int, only_torch: bool = False) -> None:
    """Seeds the global CPU generators by ``key``, 0 <= key < 2^64; call it within `preserve_rng`.

    ``only_torch`` leaves out Python's and numpy's, which takes 30 us less. torchvision draws from
    torch's generator, timm's transforms from all three.
    """
    torch.default_generator.manual_seed(key)
    if not only_torch:
        random.seed(key)
        np.random.seed([key & 0xFFFFFFFF, key >> 32])


class TrainingBatches(Dataset[Batch]):
    """A data set over the steps of a stage: ``batches[step]`` is this rank's `Batch`.

    Read it as ``DataLoader(batches, batch_size=None, sampler=range(start, total))`` with any
    ``num_workers``. Steps count over all epochs, without an end: step = epoch * steps_per_epoch +
    step within the epoch. A resumed run begins at another ``start``. With another world size a rank
    takes another part of the same global batches.

    dataset       reads the samples; its transform makes the views
    plan          the plan of any epoch of the stage; its seed and stage also key augmentation and
                  captions
    num_views     how many times each image is transformed, each time with other random draws
    rank, world_size   this process takes columns [rank * b, (rank + 1) * b), b = global_batch / W
    class_labels  gives the classes of samples; None: batches have no classes
    bad_ids       samples known to be unusable: never tried as a replacement
    sentences     how sentences of a caption are drawn; None: the whole caption is read
    transforms    the first step of each transform, where the image size changes: [(0, ...), ...];
                  empty: the data set's throughout

    All random draws of a sample are keyed by (seed, stage, epoch, sample_id): its augmentation
    (views after the first also by the number of the view), the choice of its caption, which all
    views share, and that of sentences. Where samples have weights, an epoch may draw a sample
    several times, and the number of the draw (its occurrence) is in the keys too.
    The head of this module says how undecodable samples are replaced. Where captions are read, a
    sample without one counts as undecodable.
    """

    def __init__(
        self,
        dataset: TarDataset,
        plan: EpochPlan,
        *,
        num_views: int = 1,
        rank: int = 0,
        world_size: int = 1,
        class_labels: ClassLabels | AttributeClasses | None = None,
        bad_ids: Iterable[int] | Integers = (),
        sentences: SentencesConfig | None = None,
        transforms: Sequence[tuple[int, PictureTransform]] = (),
    ) -> None:
        self._transforms = transforms or [(0, dataset.transform)]
        self.dataset, self._plan, self._sentences = dataset, plan, sentences
        self.grouped, self.global_batch = plan.grouped, plan.global_batch
        self.num_views, self.rank, self._class_labels = num_views, rank, class_labels
        self.local_batch = self.global_batch // world_size
        self.steps_per_epoch = plan.steps_per_epoch
        # A tokenizer of open_clip with a ``reduction_mask`` draws words from Python's generator.
        masks = getattr(dataset.tokenizer, "reduction_fn", None) is not None
        self._only_torch = dataset.transform.draws_from_torch_alone and not masks
        self._bad_ids = frozenset(int(sample_id) for sample_id in bad_ids)

    def plan(self, epoch: int) -> EpochPlan:
        """Returns the plan of an epoch, and keeps it in memory for further calls."""
        if epoch != self._plan.epoch:
            self._plan = self._plan.of_epoch(epoch)
        return self._plan

    def transform(self, step: int) -> PictureTransform:
        """Returns the transform that makes the views of a step."""
        return next(each for start, each in reversed(self._transforms) if start <= step)

    def __getitem__(self, step: int) -> Batch:
        """Makes this rank's batch of a step of the stage.

        Raises RuntimeError if a bad sample cannot be replaced.
        """
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        planned = self.plan(epoch).batch(epoch_step)
        in_batch = frozenset(planned.ids.tolist())
        first = self.rank * self.local_batch
        mine = slice(first, first + self.local_batch)
        group_ids = planned.group_ids[mine].copy()
        samples: list[Sample] = []
        replaced: dict[int, str] = {}
        raws = self.dataset.read_many(planned.ids[mine])
        self._start_reading_next(step, mine)
        occurrence = None if planned.occurrence is None else planned.occurrence[mine]
        for row, sample in enumerate(self._decoded(raws, planned.ids[mine], step, occurrence)):
            if isinstance(sample, BadSample):
                replaced[sample.sample_id] = sample.reason
                place = int(planned.positions[first + row])
                positions = self._candidates(sample.sample_id, place, first + row, epoch)
                of_row = None if occurrence is None else occurrence[row : row + 1]
                sample, position = self._replacement(sample, positions, in_batch, step, of_row)
                group_ids[row] = self._label_at(position, planned.prefix_length)
            samples.append(sample)
        sample_id = np.array([sample.sample_id for sample in samples], dtype=np.int64)
        classes, finish = self._class_labels, self.transform(step).finish
        return Batch(
            views=[finish(view) for view in zip(*(s.views for s in samples), strict=True)],
            group_ids=torch.from_numpy(group_ids[:, None]),
            classes=None if classes is None else torch.from_numpy(classes[sample_id]),
            sample_id=torch.from_numpy(sample_id),
            step=step,
            group_size=planned.group_size,
            prefix_length=planned.prefix_length,
            text=_stack([sample.text for sample in samples]),
            text_features=_stack([sample.text_features for sample in samples]),
            replaced=replaced,
            extras={n: torch.stack([s.extras[n] for s in samples]) for n in samples[0].extras},
        )

    def caption_numbers(
        self, sample_ids: Ids, epoch: int, occurrence: Integers | None = None
    ) -> Integers:
        """Draws the number of a caption for each sample: int64 [n].

        ``occurrence`` int64 [n] tells repeated draws of a sample apart, where samples have weights.
        """
        keys = self._keys(_CAPTION, epoch, sample_ids, occurrence)
        return self.dataset.index.draw_captions(np.asarray(sample_ids, dtype=np.int64), keys)

    def sentence_draws(
        self, sample_ids: Ids, epoch: int, occurrence: Integers | None
    ) -> list[Callable[[str], str] | None]:
        """Returns for each sample the function that draws sentences of its caption, or None.

        None means that captions stay whole. The draws are keyed as those of ``caption_numbers``.
        """
        if self._sentences is None:
            return [None] * len(sample_ids)
        keys = self._keys(_SENTENCES, epoch, sample_ids, occurrence).tolist()
        return [partial(draw_sentences, key=key, options=self._sentences) for key in keys]

    def _keys(
        self, purpose: int, epoch: int, sample_ids: Ids, *words: int | Integers | None
    ) -> npt.NDArray[np.uint64]:
        """Returns the key of a draw for each sample; ``words`` enter it too, unless None."""
        more = [word for word in words if word is not None]
        ids = np.asarray(sample_ids, dtype=np.int64)
        keys = mix(self._plan.seed, self._plan.stage, epoch, purpose, ids, *more)
        return np.asarray(keys, dtype=np.uint64)

    def _start_reading_next(self, step: int, mine: slice) -> None:
        """Begins to read this process's next batch from urls, while the present one is decoded.

        A loader gives its workers steps in turn, so that the next step is num_workers later. At the
        end of a training that batch is read in vain.
        """
        if self.dataset.bytes.reader.urls:
            worker = get_worker_info()
            epoch, epoch_step = divmod(
                step + (worker.num_workers if worker else 1), self.steps_per_epoch
            )
            plan = self._plan if epoch == self._plan.epoch else self._plan.of_epoch(epoch)
            self.dataset.bytes.start(plan.batch(epoch_step).ids[mine], self.dataset.members)

    def _decoded(
        self,
        raws: Sequence[RawSample | BadSample],
        sample_ids: Ids,
        step: int,
        occurrence: Integers | None,
    ) -> list[Sample | BadSample]:
        """Decodes and augments samples. A sample does not depend on the others in the call."""
        epoch, draw = step // self.steps_per_epoch, self.transform(step).draw
        numbers = self.caption_numbers(sample_ids, epoch, occurrence).tolist()
        draws = [0] * len(raws)
        if self.dataset.extras:
            draws = self._keys(_EXTRAS, epoch, sample_ids, occurrence).tolist()
        parts, keys = self.sentence_draws(sample_ids, epoch, occurrence), []
        for view in range(self.num_views):  # without occurrences the first view has no number
            words = ([view] if view else []) if occurrence is None else [view, occurrence]
            keys.append(self._keys(_AUGMENTATION, epoch, sample_ids, *words).tolist())
        views = [
            [partial(self._view, k, draw) for k in of_one] for of_one in zip(*keys, strict=True)
        ]
        with preserve_rng():
            return [
                self.dataset.decode(*of_sample)
                for of_sample in zip(raws, numbers, views, parts, draws, strict=True)
            ]

    def _view(self, key: int, draw: Callable[[Any], Any], image: Any) -> Any:
        seed_generators(key, self._only_torch)
        return draw(image)

    def _replacement(
        self,
        bad: BadSample,
        positions: Iterable[int],
        in_batch: frozenset[int],
        step: int,
        occurrence: Integers | None,
    ) -> tuple[Sample, int]:
        for position in positions:
            candidate = int(self.grouped.sample_ids[position])
            if candidate in in_batch or candidate in self._bad_ids:
                continue
            raws = self.dataset.read_many([candidate])
            sample = self._decoded(raws, [candidate], step, occurrence)[0]
            if isinstance(sample, Sample):
                return sample, position
        name = self.dataset.index.names([bad.sample_id])[0]
        raise RuntimeError(
            f"sample {name} is unusable ({bad.reason}) and no sample is left to take its place in "
            f"a global batch of {self.global_batch} from {self.grouped.num_samples} samples: "
            "lower the global batch, or take the sample out of the data"
        )

    def _candidates(self, sample_id: int, place: int, column: int, epoch: int) -> Iterator[int]:
        """Yields each position that is congruent to the column once, nearest groups first, and then
        all other positions, for small data of which a batch holds a large part.

        ``place`` is the position of the bad sample ``sample_id`` in the grouped index.
        """
        key = int(mix(self._plan.seed, epoch, _REPLACEMENT, sample_id))
        tried = range(0)
        for length in range(len(self.grouped.radices), -1, -1):
            start, stop = self.grouped.group_range(self._label_at(place, length), length)
            positions = range(start + (column - start) % self.global_batch, stop, self.global_batch)
            yield from (each for each in _turned(positions, key) if each not in tried)
            tried = positions
        yield from (each for each in _turned(range(stop), key) if each not in tried)

    def _label_at(self, position: int, prefix_length: int) -> int:
        group = int(np.searchsorted(self.grouped.group_starts, position, side="right")) - 1
        label = np.asarray(self.grouped.group_labels[group : group + 1])
        return int(truncate(label, self.grouped.radices, prefix_length)[0])


def _turned(positions: range, key: int) -> Iterator[int]:
    """Yields all positions in turn, from the one at number ``key`` (modulo their number) on."""
    return (positions[(key + number) % len(positions)] for number in range(len(positions)))


def _stack(rows: list[Tensor | None]) -> Tensor | None:
    present = [row for row in rows if row is not None]
    return torch.stack(present) if present else None
