"""Passes that a batch runs beside its steps: they fill the exit's KV, score the exit and find domains of prompts.

Plain steps do not run the exit, so its KV is filled later, for many tokens at a time. Exit scores, at plainly decoded
tokens and at the ends of prompts, update the skills by which the governor predicts whether drafting pays.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress

from selfspec.backends.base import Backend, Step
from selfspec.cache.kv_cache import CacheFull
from selfspec.drafters import Drafters
from selfspec.governor.governor import Governor
from selfspec.profiles.router import Embedded
from selfspec.sequence import Request, Sequence
from selfspec.speculation.exit import Exit
from selfspec.speculation.plan import Plan

_EMBEDDED_PROMPTS = 16  # of a request, for its domain; running sequences wait for their pass


class BatchScoring:
    """Counts the plain steps of one batch, and launches passes that fill and score its exit and route its prompts."""

    def __init__(self, backend: Backend, drafters: Drafters) -> None:
        self._backend, self._drafters = backend, drafters
        self.unfilled = 0  # plain steps since the exit's KV was filled, the one in flight included
        self._unscored = 0  # plain steps since the exit was scored, the one in flight included
        self.prompts: list[Sequence] = []  # one sequence per prompt that is neither scored nor routed yet
        self._routing: list[tuple[list[Request], Embedded]] = []  # requests whose domain is being found

    def reset(self) -> None:
        """Drops the counts, prompts and results of sequences that have all left. Waits for their embeddings, since
        reading them returns their pinned memory to its pool."""
        self.unfilled = self._unscored = 0
        self.prompts = []
        routing, self._routing = self._routing, []
        for _, embedded in routing:
            with suppress(Exception):  # their requests have ended
                embedded.read()
        self.apply_scores(None)

    def limit_unfilled(self) -> None:
        """Limits the count to the backend's `max_unfilled`, after sequences joined or left."""
        self.unfilled = min(self.unfilled, self._backend.max_unfilled)

    def count_step(self, plan: Plan, exit: Exit | None) -> None:
        """Counts a step that was launched."""
        if plan.uses_exit:
            self._unscored = 0
        elif exit is not None and not len(plan):
            self.unfilled += 1
            self._unscored += 1

    # Plainly decoded tokens

    def score_exit(
        self, sequences: Seq[Sequence], exit: Exit | None, governor: Governor | None, in_flight: Step | None
    ) -> None:
        """Fills the exit's KV and scores the exit at plainly decoded tokens if a score is due; only fills it if the
        backend cannot hold more unfilled positions."""
        limit, is_due = float(self._backend.max_unfilled), False
        if governor is not None and governor.may_score and self._unscored > governor.score_interval - 1:
            limit, is_due = min(limit, governor.score_interval), True
        if exit is not None and self.unfilled >= limit:
            self.fill_exit(sequences, exit, is_due, in_flight)
            if is_due and governor is not None:
                self._unscored = 0
                governor.charge_score()
                self.apply_scores(governor)

    def fill_exit(self, sequences: Seq[Sequence], exit: Exit, score: bool, in_flight: Step | None) -> None:
        self._backend.fill_exit(sequences, exit, score, in_flight)
        self.unfilled = 0

    # Prompts

    def score_and_route(self, batch_size: int, exit: Exit | None, governor: Governor | None) -> None:
        """Launches the passes that score the exit at the ends of new prompts, and that find their requests' domains."""
        prompts, self.prompts = [sequence for sequence in self.prompts if not sequence.is_finished], []
        self._score_prompts(prompts, batch_size, exit, governor)
        embedding = {request for requests, _ in self._routing for request in requests}
        requests = [
            request
            for request in dict.fromkeys(sequence.request for sequence in prompts)
            if is_unrouted(request) and request not in embedding
        ]
        if not requests:
            return
        texts = [sequence.prompt for request in requests for sequence in request.first_samples[:_EMBEDDED_PROMPTS]]
        try:
            embedded = self._drafters.embed(texts)
        except CacheFull:
            self.prompts = prompts  # tried again after the next launch
            return
        self._backend.note_other_work()
        self._routing.append((requests, embedded))

    def _score_prompts(
        self, prompts: Seq[Sequence], batch_size: int, exit: Exit | None, governor: Governor | None
    ) -> None:
        """Scores the exit at the ends of prompts. Larger batches are not scored: their first steps measure
        acceptance."""
        if governor is None or exit is None or batch_size > governor.rules.max_tree_batch:
            return
        calibrated = [sequence for sequence in prompts if _prompt_agreement(sequence) is not None]
        if calibrated and governor.may_score and self._backend.score_prompts(calibrated, exit):
            governor.charge_score()
            self.apply_scores(governor)

    def apply_routing(self) -> bool:
        """Replaces the drafters of requests whose domains were found; returns whether there were any."""
        if not self._routing:
            return False
        arrived = [entry for entry in self._routing if entry[1].is_done()]
        self._routing = [entry for entry in self._routing if entry not in arrived]
        for requests, embedded in arrived:
            rows = embedded.read()
            for request in requests:
                assert request.drafter is not None and request.drafter.reroute is not None
                count = min(len(request.first_samples), _EMBEDDED_PROMPTS)
                request.draft_with(request.drafter.reroute(rows[:count]))
                rows = rows[count:]
        return bool(arrived)

    # Results

    def apply_scores(self, governor: Governor | None) -> None:
        """Updates skills with scores that have arrived, of plainly decoded tokens and of prompts."""
        for sequence, right in self._backend.exit_scores():
            if governor is not None:
                governor.observe_score(sequence.skill, right)
        for sequence, (share, positions) in self._backend.prompt_scores().items():
            calibrated = _prompt_agreement(sequence)
            for sample in sequence.request.sequences:
                if calibrated is not None and sequence in (sample, sample.parent):
                    sample.skill.observe_prompt(share, positions, calibrated)


def is_unrouted(request: Request) -> bool:
    """Whether the request drafts with another domain's drafter until its own is found."""
    return request.drafter is not None and request.drafter.reroute is not None


def _prompt_agreement(sequence: Sequence) -> float | None:
    """Mean share of prompt positions at which exit and model agreed in calibration."""
    drafter = sequence.request.drafter
    return None if drafter is None else drafter.prompt_agreement
