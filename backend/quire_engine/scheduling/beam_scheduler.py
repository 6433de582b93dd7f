# SPDX-License-Identifier: Apache-2.0
"""Beam scheduler: manages the open beam searches of a scheduler. Each beam of a search is a sequence.

A search starts as one sequence, which computes the prompt. Each step of the search extends all beams by one token. A
step can run only when every beam has computed its earlier tokens. After the step, a beam that was not chosen ends, and
its KV blocks are freed. A beam that was chosen several times forks. The forks share all blocks, and copy the last block
before they write to it.

If a group is preempted, all its beams lose their blocks. The beams resume one after the other, like other sequences,
and share the blocks of the prompt again. The scheduler calls this module. This module decides which beams exist, and
the scheduler decides which of them run.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from quire_engine.kv_cache.block_manager import BlockManager
from quire_engine.scheduling.beam_search import BeamSearch, Continuation, num_candidates
from quire_engine.sequence import BeamGroup, FinishReason, Sequence, SequenceStatus
from quire_engine.step.plan import SpanOutput
from quire_spec.errors import Internal, InvalidArgument


@dataclass(frozen=True, slots=True)
class BeamUpdate:
    """The changes that a step of a search makes to the sequences of its group."""

    group: BeamGroup
    dropped: list[Sequence] = field(default_factory=list)
    """Beams that end without becoming an output of the search."""
    forks: list[Sequence] = field(default_factory=list)
    """New beams, which start to run at once."""
    outputs: list[tuple[Sequence, SpanOutput]] = field(default_factory=list)
    """If the search is finished: its outputs, the best one first. In that case, `dropped` contains all its beams."""


class BeamScheduler:
    """The open beam searches."""

    def __init__(
        self, block_manager: BlockManager, num_blocks: int, block_size: int, max_num_seqs: int, has_window: bool
    ) -> None:
        """`has_window` says whether blocks leave a sliding window while a sequence runs."""
        self._block_manager = block_manager
        self._has_window = has_window
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._searches: dict[int, tuple[BeamGroup, BeamSearch]] = {}
        """Maps the id of a group to the group and its open search."""

    @property
    def num_unused_places(self) -> int:
        """Number of places that are reserved for further beams of the running groups."""
        return sum(group.num_unused_places for group, _ in self._searches.values())

    def check_request(self, sequence: Sequence) -> None:
        """Check a new sequence that requests beam search.

        Raises:
            InvalidArgument: there are more beams than max_num_seqs, or too few KV blocks for the beams even if nothing
                else runs.
        """
        width = sequence.params.num_sequences
        name = "n" if sequence.params.best_of is None else "best_of"
        if width > self._max_num_seqs:
            raise InvalidArgument(
                f"sampling parameter {name!r}: {width} beams are more than max_num_seqs {self._max_num_seqs}; "
                "use fewer, or raise max_num_seqs"
            )
        # All beams share the full blocks of the prompt. The last prompt token is not counted, because a beam that
        # resumes must compute at least one token again. With a window, a beam that resumes can find nothing to share,
        # because the beam before it has freed blocks of the prompt.
        num_prompt_tokens = (len(sequence.prompt_token_ids) - 1) // self._block_size * self._block_size
        num_prompt_tokens *= not self._has_window
        num_prompt_blocks = self._block_manager.num_blocks(num_prompt_tokens)
        num_tokens = len(sequence.prompt_token_ids) + sequence.max_output_tokens
        num_needed = num_prompt_blocks + width * (self._block_manager.num_blocks(num_tokens) - num_prompt_blocks)
        if num_needed > self._num_blocks:
            raise InvalidArgument(
                f"sampling parameter {name!r}: {width} beams of {num_tokens} tokens need {num_needed} KV blocks, but "
                f"the cache has {self._num_blocks}; use fewer beams, or lower max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Start a search with a new sequence."""
        params = sequence.params
        group = BeamGroup(
            sequence.id, params.num_sequences, num_candidates(params, len(sequence.stop_token_ids)), [sequence]
        )
        sequence.beam_group = group
        self._searches[group.id] = (group, BeamSearch(sequence))

    def remove(self, group: BeamGroup) -> None:
        """End a search."""
        self._searches.pop(group.id, None)

    def find(self, group_id: int) -> BeamGroup | None:
        """Return the group of an open search."""
        entry = self._searches.get(group_id)
        return None if entry is None else entry[0]

    def extend(self, outputs: dict[Sequence, SpanOutput]) -> list[BeamUpdate]:
        """Extend the beams that a step computed. If `outputs` contains a beam, it contains all beams of the same
        group."""
        continuations: defaultdict[int, list[Continuation]] = defaultdict(list)
        for beam, output in outputs.items():
            assert beam.beam_group is not None and output.candidates is not None
            continuations[beam.beam_group.id] += [Continuation(beam, candidate) for candidate in output.candidates]
        return [self._extend_group(*self._searches[group_id], entries) for group_id, entries in continuations.items()]

    def share_prompt_blocks(self, group: BeamGroup) -> None:
        """Let the other beams of a preempted group wait for the first beam.

        They wait until the first beam has computed the prompt, and then share the blocks of the prompt.
        """
        first_beam = min(group.sequences, key=lambda beam: beam.sort_key)
        for beam in group.sequences:
            beam.parent = None if beam is first_beam else first_beam

    def check_integrity(self, sequences: dict[int, Sequence]) -> None:
        """Raise Internal if the beams of the open searches differ from the beams in `sequences`, or if the beams of one
        search have different lengths."""
        beams = {beam.id: beam for group, _ in self._searches.values() for beam in group.sequences}
        expected = {i: sequence for i, sequence in sequences.items() if sequence.beam_group is not None}
        lengths = [{beam.num_tokens for beam in group.sequences} for group, _ in self._searches.values()]
        if beams != expected or any(len(values) != 1 for values in lengths):
            raise Internal(
                f"beam search: {len(self._searches)} groups contain the sequences {sorted(beams)} with {lengths} "
                f"tokens, but the beams are {sorted(expected)}"
            )

    def _extend_group(self, group: BeamGroup, search: BeamSearch, continuations: list[Continuation]) -> BeamUpdate:
        chosen = search.extend(continuations)
        if search.is_finished:
            return BeamUpdate(group, dropped=list(group.sequences), outputs=_to_outputs(group, search))
        kept = {continuation.beam for continuation in chosen}
        dropped = [beam for beam in group.sequences if beam not in kept]
        used_ids = {beam.id for beam in kept}
        free_ids = (i for i in range(group.id, group.id + group.width) if i not in used_ids)
        # All forks are created first, because a fork copies its beam before the beam is extended.
        beams = []
        forks = []
        for continuation in chosen:
            if continuation.beam in kept:
                kept.remove(continuation.beam)
                beams.append(continuation.beam)
            else:
                forks.append(self._fork(continuation.beam, group, next(free_ids)))
                beams.append(forks[-1])
        for beam, continuation in zip(beams, chosen, strict=True):
            beam.output_token_ids.append(continuation.candidate.token_id)
            if continuation.candidate.logprobs is not None:
                beam.output_logprobs.append(continuation.candidate.logprobs)
        group.sequences = beams
        group.scores = [continuation.candidate.score for continuation in chosen]
        return BeamUpdate(group, dropped, forks)

    def _fork(self, beam: Sequence, group: BeamGroup, sequence_id: int) -> Sequence:
        """Return a new beam with the tokens and the blocks of `beam`."""
        self._block_manager.share(beam)
        priority, tag, arrival, _ = beam.sort_key
        return replace(
            beam,
            id=sequence_id,
            sort_key=(priority, tag, arrival, sequence_id - group.id),
            output_token_ids=list(beam.output_token_ids),
            output_logprobs=list(beam.output_logprobs),
            block_table=list(beam.block_table),
            kept_blocks=list(beam.kept_blocks),
            block_hashes=list(beam.block_hashes),
        )


def _to_outputs(group: BeamGroup, search: BeamSearch) -> list[tuple[Sequence, SpanOutput]]:
    """Return the best outputs as finished sequences. Their ids count up from the id of the request. If there are no
    outputs, return one failed sequence."""
    beam, hypotheses = group.sequences[0], search.best_outputs()
    if not hypotheses:
        failed = replace(beam, id=group.id, status=SequenceStatus.FINISHED, finish_reason=FinishReason.ERROR)
        return [(failed, SpanOutput([]))]
    return [
        (
            replace(
                beam,
                id=group.id + index,
                status=SequenceStatus.FINISHED,
                finish_reason=output.finish_reason,
                output_token_ids=output.token_ids,
                block_table=[],
                kept_blocks=[],
            ),
            SpanOutput(output.token_ids, output.logprobs, cumulative_logprob=output.cumulative_logprob),
        )
        for index, output in enumerate(hypotheses)
    ]
