"""Sessions whose cycles run on the device as kernels: the host launches a cycle and reads the one before it.

Sits its rows down on a machine's seats, replays cycles, and does with the tokens what every session does. Requests that
need the host between the model's logits and its choice (processors, penalties) use the same kernels outside of a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.backends.cuda.decoder import Seats, on_its_way
from selfspec.backends.cuda.exit_scoring import OFFERED, scored_places
from selfspec.backends.cuda.graphs import Machine, Mail
from selfspec.backends.cuda.short_prefill import passes
from selfspec.backends.cuda.step import Cycle, Drawing
from selfspec.backends.torch_backend import Session, most_patience
from selfspec.cache.kv_cache import PAGE_SIZE, CacheFull
from selfspec.garbage import garbage_waits
from selfspec.governor.governor import MEASURING
from selfspec.kernels.accept import COUNT, LAST, TOKENS
from selfspec.kernels.final_norm import places_for
from selfspec.sequence import Row, Turn
from selfspec.speculation.draft_tree import Draft
from selfspec.speculation.exit_scoring import PROMPT_END
from selfspec.speculation.plan import MAX_NODES, NONE, Plan

AHEAD = 256  # positions whose pages are taken at once, so that page tables seldom change
LONGEST_CAPTURED_PROMPT = 8192
_LATE = 1.05  # times its own time on the device: what a cycle takes at most that is not to blame for a late host


@dataclass
class Scores:
    """What the exit would have drafted, on its way."""

    rows: list[Row | None]  # by seat
    ends: list[int]  # how many tokens each of them has where those that waited end
    count: int  # of those; the oldest of them are scored
    mail: Mail


@dataclass
class Flight:
    """A cycle that was launched and whose report is on its way."""

    seated: list[Row | None]  # by seat
    plan: Plan
    reason: str | None
    mail: Mail
    is_usual: bool = True  # it takes as long as such cycles usually do
    follows: bool = False  # it was launched while the one before was on its way
    pause: float = 0.0  # seconds before that, in which nobody asked for a cycle
    scores: Scores | None = None  # of the plain cycles before it

    @property
    def rows(self) -> int:
        """For how many it was launched."""
        return sum(row is not None for row in self.seated)


class DeviceSession(Session):
    """A session whose cycles are kernels. On the device everything is as in Session, to the token."""

    ease = 1

    def __init__(self, *args: Any, machine: Machine, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.machine = machine
        machine.take_memory()
        self._seated: list[Row | None] = []  # by seat; None: nobody's, since a text ended there
        self._pages_moved = False  # the device has not been told of new pages
        self._owned: set[int] = set()  # rows, by id, that share no page they write to
        self._flight: Flight | None = None
        self._landed: Mail | None = None  # of the newest cycle that was read: the next one's time is taken from there
        self._drawing = Drawing.of(self.sampling)
        self._ends = frozenset(self.sampling.eos_token_ids)
        self._longest = max(row.max_length for row in self.rows)
        self._keys: dict[tuple[int, Plan], int] = {}  # by seats and plan, what the machine keeps their cycle under
        self._waiting = 0  # plain cycles that the exit's cache lacks, those in flight included
        self._unscored = 0  # and those that nobody has looked at, although it may have them
        self._is_behind = False  # the device had finished before anybody was ready to launch the next cycle
        self._owed: tuple[Any, ...] | None = None  # what is still to be told of the newest cycle that was read
        self._has_moved = False  # to other seats, for the cycle to be launched
        self._left_at = 0.0  # when the cycle before was over, and how long ago that was when this one was asked for
        self._pause = 0.0
        self._hurried = 0  # cycles since the governor saw one
        self._has_time = True  # to choose a plan, before the next cycle is launched
        self._judged: list[int] = []  # seats whose prompts are judged
        self._end_so_far: torch.Tensor | None = None  # of a prompt that comes in chunks, what it will be judged by
        self._shares: Mail | None = None  # of these at which exit and model agree, on their way to the host
        self._cycle: Cycle | None = None  # of the pass in progress, where the host chooses
        if self.governor is not None and self._host_chooses:
            self.governor.is_watched = False  # nothing waits there, so nothing is scored

    def run(self) -> Generator[None, None, None]:
        with garbage_waits():
            yield from super().run()

    def _timed(self, step: Callable[[], None]) -> None:
        with self.machine.current():
            super()._timed(step)

    def _expect(self) -> None:
        """All prompts are on their way, and the rows seated. How the exit agreed with the prompts comes with the first
        cycle's tokens; only a host that chooses waits for it."""
        if self._judged or not self._host_chooses:
            self._reserve(self.rows, NONE)
            seats = self._sit(self.rows)
        super()._expect()
        if self._judged:
            self._judge(seats)
            if self._host_chooses:
                self._learn_prompts()

    def _judge(self, seats: Seats) -> None:
        """The prompts at these seats, all in one pass."""
        assert self.exit is not None
        judge, replay = self.machine.judge(seats, self.exit, self._longest)
        replay()
        self._shares = self.machine.mail(judge.agreement)
        self._shares.send(judge.agreement, self.machine.stream)

    def _learn_prompts(self) -> None:
        """What the exit's agreement with the prompts tells; waits for it."""
        judged, mail, self._judged, self._shares = self._judged, self._shares, [], None
        if mail is not None and self._usual_agreement is not None:
            shares = mail.read()
            for seat in judged:
                row = self.rows[seat]
                row.watch.learn_prompt(shares[seat], min(len(row.prompt) - 1, PROMPT_END), *self._usual_agreement)
            self.machine.take_back(mail)
            super()._expect()

    def _keep_end(self, row: Row, end: torch.Tensor) -> None:
        """What a prompt is judged by goes where its row will sit, if prompts are judged."""
        if self._usual_agreement is not None:
            seat = self.rows.index(row)
            self.machine.ends(self.machine.seats(len(self.rows)))[:, seat].copy_(end)
            self._judged.append(seat)

    def _prefill_prompts(self, firsts: list[Row]) -> None:
        """Short ones share passes of the kernels that decode, the others are alone. Which way a prompt goes follows
        from its own length, so what is computed for it depends on nothing else."""
        most = self.machine.short_prompt + 1
        short = [row for row in firsts if 1 < len(row.prompt) <= most]
        for group in passes([len(row.prompt) - 1 for row in short]):
            self._prefill_together(short[group.start : group.stop])
        super()._prefill_prompts([row for row in firsts if len(row.prompt) > most])

    def _prefill_together(self, rows: list[Row]) -> None:
        contexts, sequences = [row.prompt[:-1] for row in rows], [row.sequence for row in rows]
        for sequence, context in zip(sequences, contexts, strict=True):
            self.cache.reserve(sequence, len(context))
        lengths = list(map(len, contexts))
        prompts, replay = self.machine.prompts(self.exit, lengths)
        prompts.load([(context, sequence.pages) for context, sequence in zip(contexts, sequences, strict=True)])
        replay()
        if self.exit is not None:
            for row, known, end in zip(rows, prompts.known[: len(rows)].clone(), prompts.judged, strict=False):
                row.known = known
                self._keep_end(row, end)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.drafted = sequence.verified = length
        self.cache.commit(sequences, list(map(range, lengths)))

    def _prefill_chunk(self, rows: list[Row], tokens: list[list[int]]) -> None:
        """A chunk of a prompt, alone: what is computed for it depends on nothing else."""
        (row,), (chunk,) = rows, tokens
        sequence, count = row.sequence, len(chunk)
        if sequence.length + count > LONGEST_CAPTURED_PROMPT:  # the device is busy enough for the host to keep up
            super()._prefill_chunk(rows, tokens)
            return
        self.cache.reserve(sequence, sequence.length + count)
        prefill, replay = self.machine.prefill(self.exit, count, sequence.length + count)
        prefill.load(chunk, sequence.length, sequence.pages)
        if self.exit is not None:
            prefill.remember(row.known, self._end_so_far if sequence.length else None)
        replay()
        if self.exit is not None:
            row.known = prefill.known[0, 0].clone()
            if sequence.length + count == len(row.prompt) - 1:
                self._keep_end(row, prefill.judged)
            else:
                self._end_so_far = prefill.judged.clone()
        sequence.drafted = sequence.verified = count
        self.cache.commit([sequence], [range(count)])

    @property
    def _host_chooses(self) -> bool:
        return bool(self.processors) or self.sampling.repetition_penalty != 1 or self.sampling.min_new_tokens > 0

    def close(self) -> None:
        self.tell()
        self.machine.take_back(self._landed, self._shares)
        if self._flight is not None:
            self.machine.take_back(self._flight.mail, self._flight.scores.mail if self._flight.scores else None)
        self._landed = self._shares = None
        self._leave_seats()
        self._seated, self._flight = [], None
        super().close()

    @torch.inference_mode()
    def cycle(self) -> None:
        """Every active row advances by at least one token. The next cycle is already on its way when its tokens are
        read; what it finds for rows that have ended meanwhile is dropped. Whoever waits for the tokens gets them before
        anybody is told what they came to."""
        if self._host_chooses:
            try:
                super().cycle()
            finally:
                self.rise()
            return
        self._pause = time.perf_counter() - self._left_at if self._left_at else 0.0
        self._is_behind = False
        if self._flight is None and self._untold is not None:  # the device has nothing to do: that comes first
            self._flight = self._launch()
        self.tell()
        flight = self._flight = self._flight or self._launch()
        assert flight is not None
        self._flight = self._launch(flight) if self._goes_on(flight) else None
        self._land(flight)
        if not self.active:
            self.tell()
        self._left_at = time.perf_counter()

    @property
    def _untold(self) -> tuple[Plan, str | None] | None:
        """The plan, and its reason, of a cycle that is over and that nobody was told of; none in which a text ended,
        since that frees its pages."""
        if self._owed is None or any(row.finish_reason is not None for row in self._owed[0]):
            return None
        turn = self._owed[1]
        return turn.plan, turn.reason

    def _goes_on(self, flight: Flight) -> bool:
        """Whether the next cycle can be launched before this one has landed: likely needed, for rows that all sit where
        this one left them."""
        sits = self._seated == flight.seated and self._owns(self.machine.seats(len(self._seated)))
        return sits and any(row.max_length - len(row.tokens) > row.usual_tokens(flight.plan) for row in self.active)

    def _owns(self, seats: Seats) -> bool:
        return self.machine.owners.get(seats.count) is self

    def _launch(self, before: Flight | None = None) -> Flight | None:
        """Sends a cycle off. One that follows another in flight must not have to be captured first: that would empty
        the seats, and where the rows stand is known only when the other has landed."""
        rows = self.active
        plan, reason = self._next_plan(rows, before)
        try:
            self._reserve(rows, plan, before)
        except CacheFull:
            if before is not None:  # it may be the end of it
                return None
            raise
        seats = self.machine.seats(len(rows))
        key, cycle = self._find_cycle(seats, plan)
        if not self.machine.is_captured(key):
            if before is not None:
                return None
            self.machine.replay(key)
        self._has_moved = False
        self._sit(rows, in_flight=before is not None)
        room = places_for(seats.count)
        looks = self._looks(reason, room)
        catches_up = looks or self._waiting >= room or (self._waiting > 0 and len(plan) > 0)
        scores = self._keep_up(seats, looks, before) if catches_up else None
        mail, stream = self.machine.mail(cycle.report), self.machine.stream
        self._is_behind = before is not None and before.mail.is_there
        is_next = before is not None and before.mail is self.machine.newest_mail and not self._is_behind
        mail.start(stream, self.machine.newest_mail if is_next else None)
        self.machine.replay(key)()
        mail.send(cycle.report, stream)
        self.machine.newest_mail = mail
        if len(plan):
            self._unscored = 0
            self._be_patient(looked=False)
        elif self.exit is not None:
            self._waiting += 1
            self._unscored += 1
        # Of a request's first one the host's launch is a part; where nothing is known yet that is better than nothing.
        # Catching up is a part of what drafting takes, but not of being plain; moving is neither's.
        unknown = reason == MEASURING and self.costs.plain(len(rows), max(len(row.tokens) for row in rows)) is None
        is_usual = (before is not None or unknown) and (len(plan) > 0 or not catches_up) and not self._has_moved
        return Flight(list(self._seated), plan, reason, mail, is_usual, before is not None, self._pause, scores)

    def _find_cycle(self, seats: Seats, plan: Plan) -> tuple[int, Cycle]:
        """The cycle of these seats with this plan, and what the machine keeps it under."""
        key = self._keys.get((seats.count, plan))
        cycle = None if key is None else self.machine.kept_cycle(key)
        if key is None or cycle is None:
            key, cycle = self.machine.cycle(seats, plan, self.exit, self._drawing, self._longest)
            self._keys[seats.count, plan] = key
        return key, cycle

    def _looks(self, reason: str | None, room: int) -> bool:
        """Whether the exit is to be scored: nobody has looked for long, and enough waits to tell something."""
        is_much = self._waiting >= min(self._at_once, room)
        return is_much and self._unscored >= self._patience and self._scoring > 0 and is_governed(reason)

    @property
    def _most_patience(self) -> int:
        return most_patience(len(self.active), self.policy.rules)

    def _keep_up(self, seats: Seats, looks: bool, before: Flight | None) -> Scores | None:
        """The exit sees what it has missed, and is scored by it if somebody looks."""
        count, report = self._waiting, self._catch_up(seats, scores=looks)
        if looks:
            self._unscored = 0
            self._be_patient(looked=True)
        if not report.numel():
            return None
        mail = self.machine.mail(report)
        mail.send(report, self.machine.stream)
        more = 0 if before is None else 1  # one that is plain, or nothing would be waiting
        ends = [0 if row is None else len(row.tokens) + more for row in self._seated]
        return Scores(list(self._seated), ends, count, mail)

    def _catch_up(self, seats: Seats, scores: bool = False) -> torch.Tensor:
        assert self.exit is not None
        self._waiting = 0
        return self.machine.catch_up(seats, self.exit, self._drawing, self._longest, scores)

    def _learn_scores(self, scores: Scores) -> None:
        """Which of the tokens that were decoded plainly would have been the best draft: of rank 0, others missed."""
        drafted = scores.mail.read()
        self.machine.take_back(scores.mail)
        seats = self.machine.seats(len(scores.rows)).count
        count = min(scores.count, scored_places(seats))
        watches, ranks = [], []
        for place, (row, end) in enumerate(zip(scores.rows, scores.ends, strict=True)):
            if row is not None and row.finish_reason is None:
                start = end - scores.count
                drafts = zip(row.tokens[start : start + count], drafted[place::seats][:count], strict=True)
                watches.append(row.watch)
                ranks.append([int(token != draft) for token, (draft,) in drafts])
        if self.governor is not None and watches:
            self.governor.scored(watches, ranks, OFFERED)

    def _next_plan(self, rows: list[Row], before: Flight | None) -> tuple[Plan, str | None]:
        """In a hurry the one in flight again, if it is still for as many. Where a prompt lies far from what calibration
        saw nothing is drafted before it is known how the exit agreed with it: that shows while the first cycle runs."""
        in_doubt = self._shares is not None and any(row.watch.is_unfamiliar for row in rows)
        if before is None:
            return (NONE, MEASURING) if in_doubt else self.choose_plan(rows, self._untold, is_over=True)
        if in_doubt:
            self._learn_prompts()
        if not self._has_time and self._may_go_unseen(before.plan) and before.rows == len(rows):
            return before.plan, before.reason
        return self.choose_plan(rows, (before.plan, before.reason))

    def _may_go_unseen(self, plan: Plan) -> int:
        """How many cycles of this plan may, in a row: some if the governor has settled on it, since one more tells
        little and what it costs is booked."""
        governor = self.governor
        return governor.unseen_cycles if governor is not None and len(plan) and plan == governor.plan else 0

    def _land(self, flight: Flight) -> None:
        """Reads a cycle's report: rows take their tokens, at once where nothing can end among them and nobody listens.
        Those of texts that have ended meanwhile are dropped. Where the device had to wait for the host's own work, or
        there is more of it to come, that is left to a few cycles: the governor learns only from some, and chooses again
        before others."""
        reports, seconds = flight.mail.read(), flight.mail.seconds
        landed, self._landed = self._landed, flight.mail
        # What others did, or whoever reads the tokens, is no cycle's fault; that a host was late, no plain one's, nor
        # that of a plan which nobody knows yet: its first cycles take the host longer than any later.
        passed = max(seconds, flight.mail.after(landed) - flight.pause) if flight.follows and landed else seconds
        passed = passed if self._is_known(flight) else min(passed, _LATE * seconds)
        self._learn_prompts()
        self.machine.take_back(landed)
        if flight.scores is not None:
            self._learn_scores(flight.scores)
        plan, ends = flight.plan, self._ends
        one_by_one = self.on_token is not None or bool(self.stops)
        rows, lasts = [], []
        for row, report in zip(flight.seated, reports, strict=False):  # there may be more seats
            if row is None or row.finish_reason is not None:
                continue
            count, last = report[COUNT], report[LAST]
            tokens = report[TOKENS : TOKENS + count]
            row.sequence.length += count
            if one_by_one or len(row.tokens) + count >= row.max_length or not ends.isdisjoint(tokens):
                last = self._take(row, tokens, plan, last)
            else:
                row.tokens += tokens
            rows.append(row)
            lasts.append(last)
        unseen = self._may_go_unseen(plan) if self._is_behind or self._will_move else 0
        hurry = self._hurried < unseen
        self._hurried = self._hurried + 1 if hurry else 0
        self._has_time = self._hurried == unseen
        if rows:
            usual = len(rows) == flight.rows and flight.is_usual
            self._owed = rows, Turn.of(plan, plan, flight.reason), lasts, seconds, passed if usual else None, hurry

    def _is_known(self, flight: Flight) -> bool:
        """Whether such cycles, which draft, have been timed before."""
        if self.governor is None or not len(flight.plan):
            return False
        context = max(len(row.tokens) for row in flight.seated if row is not None)
        return self.governor.knows(flight.plan, flight.rows, context)

    @property
    def _will_move(self) -> bool:
        """Whether so few rows are left that they go to other seats before the next cycle."""
        left, seated = len(self.active), len(self._seated)
        return 0 < left < seated and self.machine.seats(left).count < seated

    def tell(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            self._account(*owed)

    def _take(self, row: Row, tokens: list[int], plan: Plan, last: int) -> int:
        """A row takes a cycle's tokens one by one, accepted down to a last node; returns the node after which its text
        ended, or that one."""
        for place, token in enumerate(tokens):
            self._emit(row, token, drafted=place < len(tokens) - 1)
            if row.finish_reason is not None:
                return plan.path(last)[place]
        return last

    def _reserve(self, rows: list[Row], plan: Plan, before: Flight | None = None) -> None:
        """Takes pages enough for a cycle and the one before it."""
        more = plan.depth + len(plan) + 2 + (0 if before is None else before.plan.depth + 1)
        for row in rows:
            self._take_pages(row, row.sequence.length + more)

    def _sit(self, rows: list[Row], in_flight: bool = False) -> Seats:
        """Makes sure that these rows sit on the device's seats. With a cycle in flight they do already, and some beside
        them may have ended: the others stay as long as there are no fewer seats for so many. Where they stand then is
        known to the device alone, which moves them up."""
        seats = self.machine.seats(len(rows))
        if self._owns(seats) and [row for row in self._seated if row and row.finish_reason is None] == rows:
            self._empty_seats(seats)
            if self._pages_moved:
                self._write_pages(seats, self._seated)
        elif in_flight:
            self._move_up(seats, rows)
        else:
            self.rise()
            self.machine.vacate(seats)
            self._write_rows(seats, rows)
            self._own(seats, rows)
        return seats

    def _empty_seats(self, seats: Seats) -> None:
        """Of rows whose texts have ended."""
        for place, row in enumerate(self._seated):
            if row and row.finish_reason is not None:
                seats.empty(place, self.machine.idle_page())
                self._seated[place] = None

    def _own(self, seats: Seats, rows: list[Row]) -> None:
        self.machine.owners[seats.count] = self
        self._seated = list(rows)

    def _move_up(self, seats: Seats, rows: list[Row]) -> None:
        """Rows that remain move to the seats of a smaller batch, once what is in flight is over."""
        left, places = self.machine.seats(len(self._seated)), {id(row): place for place, row in enumerate(self._seated)}
        self._has_moved = True
        self._leave_nothing_waiting(left)
        self._leave_seats()
        self.machine.move(left, seats, self.exit, [places[id(row)] for row in rows])
        if self._pages_moved:
            self._write_pages(seats, rows)
        self._own(seats, rows)

    def _take_pages(self, row: Row, least: int) -> None:
        if least <= len(row.sequence.pages) * PAGE_SIZE and id(row) in self._owned:
            return
        ahead = max(least, min(least + AHEAD, row.max_length + MAX_NODES))
        with suppress(CacheFull):
            self.cache.reserve(row.sequence, ahead)
        self.cache.reserve(row.sequence, least)
        self._owned.add(id(row))
        self._pages_moved = True

    def _write_pages(self, seats: Seats, rows: Sequence[Row | None]) -> None:
        self._pages_moved = False
        pages = [[self.machine.idle_page()] if row is None else row.sequence.pages for row in rows]
        width = max(map(len, pages))
        table = [of_row + of_row[:1] * (width - len(of_row)) for of_row in pages]
        ints = on_its_way(torch.tensor(table, dtype=torch.int32), seats.page_table.device)
        seats.page_table[: len(rows), :width].copy_(ints, non_blocking=True)

    def _write_rows(self, seats: Seats, rows: list[Row]) -> None:
        self._write_pages(seats, rows)
        lengths, last = [row.sequence.length for row in rows], [row.tokens[-1] for row in rows]
        seats.seat([row.seed for row in rows], lengths, last, [row.copy for row in rows], self.sampling)
        drafter = self.machine.drafter(seats, self.exit)
        if drafter is not None and drafter.known is not None:
            drafter.known[: len(rows)].copy_(self._last_known(rows)[:, 0])
        self._fill_head(seats)

    def _fill_head(self, seats: Seats) -> None:
        drafter = self.machine.drafter(seats, self.exit)
        if drafter is not None and drafter.head is not None:
            assert drafter.exit.head_rows is not None
            drafter.head.fill(drafter.exit.head_rows)

    def rise(self) -> None:
        """Leaves the seats; what the exit recalls, which only the device knows, is kept for sitting down again."""
        if not self._seated:
            return
        seats = self.machine.seats(len(self._seated))
        self._leave_nothing_waiting(seats)
        drafter = self.machine.drafter(seats, self.exit)
        if drafter is not None and drafter.known is not None and not self._host_chooses:
            for row, known in zip(self._seated, drafter.known[: len(self._seated)].clone(), strict=True):
                if row is not None:
                    row.known = known
        self._seated = []
        self._leave_seats()

    def _leave_nothing_waiting(self, seats: Seats) -> None:
        """Before rows go elsewhere; the pages of those that have ended may be others' by now."""
        if self._waiting:
            self._empty_seats(seats)
            self._catch_up(seats)

    def _leave_seats(self) -> None:
        owners = self.machine.owners
        for count in [count for count, owner in owners.items() if owner is self]:
            del owners[count]

    # Where the host chooses: the same kernels, pass by pass.

    def draft(self, rows: list[Row], plan: Plan) -> Draft:
        self._reserve(rows, plan)
        seats = self._sit(rows)
        _, self._cycle = self.machine.cycle(seats, plan, self.exit, self._drawing, self._longest)
        self._cycle.draft()
        return Draft(plan, self._of_rows(self._cycle.places.tokens, rows).long(), hidden=self._cycle.stream.states)

    def verify(self, rows: list[Row], draft: Draft) -> torch.Tensor:
        cycle = self._cycle
        assert cycle is not None
        cycle.verify()
        if self.exit is not None and not len(draft.plan):
            cycle.seats.lengths.add_(1)  # as if accepted: what waits is the newest position
            self._catch_up(cycle.seats)
        for row in rows:
            row.sequence.drafted = row.sequence.verified = len(draft.plan) + 1
        return self._of_rows(cycle.known, rows)

    def _let_wait(self, rows: list[Row], draft: Draft) -> None:
        """Nothing waits: verifying has filled the exit's cache already. Others may sit where these rows did next."""

    def _logits(self, known: torch.Tensor) -> torch.Tensor:
        assert self._cycle is not None
        return self._of_rows(self._cycle.logits(), self.active)

    def _of_rows(self, values: torch.Tensor, rows: list[Row]) -> torch.Tensor:
        """Node-major [(n + 1) * B, ...] to [rows, n + 1, ...]."""
        assert self._cycle is not None
        return values.unflatten(0, (-1, self._cycle.seats.count))[:, : len(rows)].transpose(0, 1)


def is_governed(reason: str | None) -> bool:
    """Whether it is for the governor to say when something is drafted again; a rule would forbid it anyway."""
    return reason in (None, MEASURING, "ood", "goodput")
