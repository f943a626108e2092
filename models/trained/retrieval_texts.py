# SPDX-License-Identifier: Apache-2.0
"""Texts of bytes that ask for a value somewhere in them: the task of the two trained models. Needs numpy only.

A text is noise letters, records ``#abc=xy;`` and queries ``?abc=``. A query's answer is the two letters of the record that has
its three letters as key. Keys of a text are distinct. Half of them at least share two letters with the key of another record, so
that wrong records score high as well. The record asked for is drawn uniformly from all that are there, so its depth is uniform.
No record is asked for twice: its value stands in one place before its query.

* ``draw_prompts``: for the causal language model. A query and its answer end each text, more of both lie within.
* ``draw_documents``: for the encoder. The query begins each text; queries within have no answer.
* ``draw_votes``: documents in which many records have the query's key, and most of them say the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PADDING, START = 0, 1
ANSWER = 2  # letters of a value
LETTERS = 26
VOCABULARY = 256
_SLOT = 8  # bytes of a record, of a query with its answer, and of noise between them
_RECORD, _QUERY, _EQUALS, _END, _A = (ord(c) for c in "#?=;a")
_KINDS = (0.35, 0.65)  # a slot is a record, a query, or noise


@dataclass(frozen=True)
class Texts:
    """A batch of texts.

    Attributes:
        ids: bytes [B, S], int64.
        answers: of the query at the end (language model) or at the front (encoder), bytes [B, 2], int64.
        depths: where the record asked for begins, as a share of S: [B], float64.
        asked: positions of the queries' first bytes within a text, -1 where there is none: [B, Q], int64. Without the
            query at the end or the front.
        asked_answers: [B, Q, 2], int64; of no meaning where ``asked`` is -1.
        records: positions of the records' first bytes, -1 where there is none: [B, Q], int64.
        record_values: [B, Q, 2], int64; of no meaning where ``records`` is -1.
    """

    ids: np.ndarray
    answers: np.ndarray
    depths: np.ndarray
    asked: np.ndarray
    asked_answers: np.ndarray
    records: np.ndarray
    record_values: np.ndarray


@dataclass(frozen=True)
class _Body:
    """Noise, records and queries, and the record that one more query asks for."""

    ids: np.ndarray  # [B, length]
    key: np.ndarray  # [B, 3]
    value: np.ndarray  # [B, 2]
    position: np.ndarray  # [B], of the record's first byte
    asked: np.ndarray  # [B, slots]
    asked_answers: np.ndarray  # [B, slots, 2]
    records: np.ndarray  # [B, slots]
    record_values: np.ndarray  # [B, slots, 2]

    def as_texts(self, ids: np.ndarray, start: int) -> Texts:
        """Texts [B, S] that have the body from position ``start`` on."""
        asked, records = (np.where(x >= 0, x + start, -1) for x in (self.asked, self.records))
        depths = (self.position + start) / ids.shape[1]
        return Texts(ids, self.value, depths, asked, self.asked_answers, records, self.record_values)


def draw_prompts(rng: np.random.Generator, count: int, length: int) -> Texts:
    """Texts for the language model: a start byte, a body, and a query with its answer as the last 7 bytes.

    Args:
        rng: that everything is drawn from.
        count: of texts.
        length: of each, at least 24.
    """
    tail = 5 + ANSWER
    body = _draw_body(rng, count, length - 1 - tail, is_causal=True)
    query = np.concatenate([np.full((count, 1), _QUERY), body.key, np.full((count, 1), _EQUALS), body.value], 1)
    ids = np.concatenate([np.full((count, 1), START), body.ids, query], 1)
    return body.as_texts(ids, 1)


def draw_documents(rng: np.random.Generator, count: int, length: int) -> Texts:
    """Texts for the encoder: a query without an answer as the first 5 bytes, and a body."""
    body = _draw_body(rng, count, length - 5, is_causal=False)
    query = np.concatenate([np.full((count, 1), _QUERY), body.key, np.full((count, 1), _EQUALS)], 1)
    return body.as_texts(np.concatenate([query, body.ids], 1), 5)


def draw_votes(rng: np.random.Generator, count: int, length: int, votes: int = 20) -> Texts:
    """Documents in which many records have the query's key: what most of them say is the answer.

    The first of these records says another value, and stands behind the first eighth of the text. All others say the answer,
    and stand behind the first quarter. So a row that leaves out whatever is not above its largest score so far finds few of
    them. No model was trained on such texts.

    Args:
        rng: that everything is drawn from.
        count: of texts.
        length: of each, at least 12 * (votes + 2).
        votes: records that say the answer.

    Returns:
        As ``draw_documents`` does, without ``asked`` and ``records``; ``depths`` are those of the first record.
    """
    texts = draw_documents(rng, count, length)
    ids, depths = texts.ids.copy(), np.empty(count)
    phase = (texts.records[texts.records >= 0].min() - 5) % _SLOT  # the same in all
    starts = np.arange(5 + phase, length - _SLOT + 1, _SLOT)
    early = starts[starts >= length // 8][0]
    late = starts[starts >= length // 4]
    for i, (text, answer) in enumerate(zip(ids, texts.answers, strict=True)):
        key = text[1:4].copy()
        asked = round(texts.depths[i] * length)
        text[asked : asked + _SLOT] = rng.integers(0, LETTERS, _SLOT) + _A
        places = [early, *rng.choice(late, votes, replace=False)]
        other = (answer - _A + rng.integers(1, LETTERS, ANSWER)) % LETTERS + _A
        for place in places:
            value = other if place == places[0] else answer
            text[place : place + _SLOT] = [_RECORD, *key, _EQUALS, *value, _END]
        depths[i] = places[0] / length
    nothing = np.full((count, 1), -1)
    unknown = np.zeros((count, 1, ANSWER), np.int64)
    return Texts(ids, texts.answers, depths, nothing, unknown, nothing, unknown)


def pad_documents(batches: Sequence[Texts]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents of several lengths as one batch, padded on the right.

    Returns:
        ids [B, S], attention_mask [B, S] and answers [B, 2], all int64.
    """
    longest = max(texts.ids.shape[1] for texts in batches)
    rows = [
        np.pad(texts.ids, ((0, 0), (0, longest - texts.ids.shape[1])), constant_values=PADDING) for texts in batches
    ]
    ids = np.concatenate(rows)
    return ids, (ids != PADDING).astype(np.int64), np.concatenate([texts.answers for texts in batches])


def _draw_body(rng: np.random.Generator, count: int, length: int, *, is_causal: bool) -> _Body:
    slots = length // _SLOT
    phase = int(rng.integers(0, length - slots * _SLOT + 1))
    kinds = np.digitize(rng.random((count, slots)), _KINDS)  # 0: record, 1: query, 2: noise
    np.put_along_axis(kinds, rng.integers(0, 1 if is_causal else slots, (count, 1)), 0, 1)
    keys = _draw_keys(rng, count, slots)
    values = rng.integers(0, LETTERS, (count, slots, ANSWER)) + _A
    slot_of = _draw_asked_slots(rng, kinds == 0, is_causal)  # [B, slots + 1]
    kinds[(kinds == 1) & _is_repeated(np.where(kinds == 1, slot_of[:, :slots], -1), slot_of[:, slots:])] = 2

    noise = rng.integers(0, LETTERS + 1, (count, length))
    ids = np.where(noise == LETTERS, ord(" "), noise + _A)
    cells = ids[:, phase : phase + slots * _SLOT].reshape(count, slots, _SLOT)
    sources = slot_of[:, :slots]
    asked_keys = np.take_along_axis(keys, sources[..., None], 1)
    asked_values = np.take_along_axis(values, sources[..., None], 1)
    record, query = kinds == 0, kinds == 1
    _write(cells, record, _RECORD, keys, values)
    _write(cells, query, _QUERY, asked_keys, asked_values if is_causal else None)

    last = slot_of[:, slots, None]
    starts = phase + _SLOT * np.arange(slots)
    return _Body(
        ids=ids,
        key=np.take_along_axis(keys, last[..., None], 1)[:, 0],
        value=np.take_along_axis(values, last[..., None], 1)[:, 0],
        position=starts[last[:, 0]],
        asked=np.where(query, starts, -1),
        asked_answers=asked_values,
        records=np.where(record, starts, -1),
        record_values=values,
    )


def _draw_keys(rng: np.random.Generator, count: int, slots: int) -> np.ndarray:
    """Distinct keys [B, slots, 3]: pairs of first letters are distinct but for every two keys, which differ in the third."""
    pairs = -(-slots // 2)
    if pairs > LETTERS * LETTERS:
        raise ValueError(f"{slots} records, expected up to {2 * LETTERS * LETTERS}")
    pair = rng.random((count, LETTERS * LETTERS)).argsort(1)[:, :pairs]
    third = rng.integers(0, LETTERS, (count, pairs))
    other = (third + rng.integers(1, LETTERS, (count, pairs))) % LETTERS
    keys = np.stack([np.stack([pair // LETTERS, pair % LETTERS, x], -1) for x in (third, other)], 2)
    order = rng.random((count, 2 * pairs)).argsort(1)[:, :slots]
    keys = np.take_along_axis(keys.reshape(count, 2 * pairs, 3), order[..., None], 1)
    return keys + _A


def _draw_asked_slots(rng: np.random.Generator, is_record: np.ndarray, is_causal: bool) -> np.ndarray:
    """For each slot and one query more, a slot with a record, drawn uniformly: of those before it where queries are causal."""
    count, slots = is_record.shape
    order = np.argsort(~is_record, 1, kind="stable")  # slots of records first, in order
    total = is_record.sum(1, keepdims=True)
    known = np.concatenate([np.cumsum(is_record, 1) if is_causal else total.repeat(slots, 1), total], 1)
    chosen = (rng.random((count, slots + 1)) * known).astype(np.int64)
    return np.take_along_axis(order, chosen, 1)


def _is_repeated(sources: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Where a query's record, [B, slots] or -1, is that of an earlier query or is taken, [B, 1]."""
    order = np.argsort(sources, 1, kind="stable")
    in_order = np.take_along_axis(sources, order, 1)
    is_same = np.concatenate([np.zeros((len(sources), 1), bool), in_order[:, 1:] == in_order[:, :-1]], 1)
    repeated = np.empty_like(is_same)
    np.put_along_axis(repeated, order, is_same, 1)
    return repeated | (sources == taken)


def _write(cells: np.ndarray, where: np.ndarray, first: int, keys: np.ndarray, values: np.ndarray | None) -> None:
    """Writes a record or a query into some slots of [B, slots, 8]."""
    cells[where, 0] = first
    cells[where, 1:4] = keys[where]
    cells[where, 4] = _EQUALS
    if values is not None:
        cells[where, 5:7] = values[where]
        cells[where, 7] = _END
