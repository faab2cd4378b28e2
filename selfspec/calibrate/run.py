"""A calibration from start to end: write, read, train, measure, time, choose, try, save.

Each stage stores its result in the work folder and is skipped when the result is there, so that a stopped run
continues. `setup` prepares the run, `outcome` makes the profile.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import count

import torch

from selfspec.calibrate import heads, outcome
from selfspec.calibrate.choice import Measured, Paths, choose
from selfspec.calibrate.corpus import Corpus, Document, text_features
from selfspec.calibrate.display import CalibrationDisplay, Stage
from selfspec.calibrate.duration import Duration, expected_duration
from selfspec.calibrate.heads import Trained
from selfspec.calibrate.measuring import Measurement, measure
from selfspec.calibrate.settings import TRAINING_SHARE, WRITING_SHARE, CalibrationSettings
from selfspec.calibrate.setup import Setup
from selfspec.calibrate.timing import step_costs
from selfspec.calibrate.training import Trainer
from selfspec.calibrate.writing import Writer
from selfspec.engine import Engine
from selfspec.governor.costs import StepCost
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.profiles.profile import Profile
from selfspec.speculation.exit import Exit

Costs = dict[tuple[int, int], StepCost]  # by exit layer and batch size

_CHECKPOINT_SECONDS = 30.0  # between two checkpoints of the exits in training: the most work that a stop loses
_SHOWN_SECONDS = 0.5  # between two updates of the training line


class Calibration:
    """One calibration of one model."""

    def __init__(self, settings: CalibrationSettings, display: CalibrationDisplay) -> None:
        self.settings, self.display = settings, display

    def run(self) -> Profile:
        self.setup = setup = Setup(self.settings)
        self.work, self.model = setup.work, setup.model
        try:
            return self._run()
        finally:
            self.work.close()

    def _run(self) -> Profile:
        setup = self.setup
        self._announce()
        try:
            self._announce_duration(expected_duration(setup))
        except ValueError:
            if self.work.is_empty:
                self.work.remove()  # a refused run leaves no folder
            raise
        self.work.begin()
        self.work.write_json("resources", asdict(setup.resources))  # from here on --resume finds a stopped run
        self.writer = Writer(setup.engine)
        if setup.trained_before is None:
            self.trained = self._train(self._write())
        else:
            names = [domain.name for domain in setup.domains]
            self.trained = Trained.from_profile(setup.trained_before, self.model, setup.layers, names)
        measured = self._measure()
        costs = self._time()
        paths = self._paths(measured)
        choices = {name: choose(of_domain, costs, self.settings.objective) for name, of_domain in paths.items()}
        profile = outcome.build(setup, self.trained, measured, paths, costs, choices, self.display.elapsed)
        profile = outcome.try_out(setup, self.trained, profile, self.display, costs[setup.layers[0], 1].plain)
        self.work.remove()
        return profile

    def _announce(self) -> None:
        """Prints what will be done."""
        setup, settings, config, say = self.setup, self.settings, self.model.config, self.display.say
        say(
            f"Calibrating {settings.model} ({config.model_type}, {config.num_layers} layers, vocabulary "
            f"{config.vocab_size:,}) on {outcome.device_name(self.model)} in {str(self.model.dtype).split('.')[-1]}"
        )
        layers = ", ".join(map(str, setup.layers))
        exits = f"exit{'s' * (len(setup.layers) > 1)} after {layers} layer{'s' * (setup.layers != [1])}"
        exits = f"{'trains' if settings.train else 'uses the trained'} {exits}"
        say(f"  domains {', '.join(domain.name for domain in setup.domains)}; {exits}; writes to {setup.out}")
        if settings.train:
            say(f"  {setup.resources.describe()}")
        if settings.resume and not self.work.resumed:
            say(f"  found no stopped run in {self.work.folder}: starts from the beginning")

    def _announce_duration(self, duration: Duration) -> None:
        """Prints how long it will take; raises ValueError where the time asked for is too short. A resumed run passed
        this check when it began, and has done a part of the work."""
        settings, say = self.settings, self.display.say
        if not self.work.resumed:
            duration.check(settings.minutes)
        less = ", less what the stopped run has done" if self.work.resumed else ""
        say(f"  takes about {duration.describe()} on this machine{less}; Ctrl-C stops it, and --resume continues it")
        if settings.train and settings.steps is None and self.model.device.type == "cpu":
            say("  a CPU trains too few steps in this time for an exit that pays; --no-train uses exits from a GPU")

    # Writing

    def _write(self) -> Corpus:
        """Writes chunks of training text, or reads those of the stopped run, until there is enough."""
        recipe = self.setup.recipe
        prompts = self.setup.training_prompts
        chunks: list[Corpus] = []
        with self.display.stage("write", self.settings.tokens) as stage:
            for number in count():
                name = f"chunk-{number:04d}"
                stored = self.work.read_tensors(name)
                if stored is None and self._is_enough(chunks, stage):
                    break
                if stored is not None:
                    chunks.append(Corpus.from_small(stored))
                    stage.advance(chunks[-1].size)
                    continue
                started = time.perf_counter()
                chunks.append(
                    self.writer.chunk(
                        prompts, number, recipe.documents, recipe.length, self.settings.seed, stage.advance
                    )
                )
                self.work.write_tensors(name, chunks[-1].small())
                seconds = self._writing_seconds() + time.perf_counter() - started
                self.work.write_json("writing_seconds", seconds)
            corpus = Corpus.join([*chunks, *self._own_text(recipe.length)])
            chosen = int(corpus.predicts.sum())
            stage.note = f"{corpus.size:,} tokens, of which the model chose {chosen:,}"
        return corpus

    def _writing_seconds(self) -> float:
        """Seconds spent on chunks so far, in this run and in those that were stopped."""
        return self.work.read_json("writing_seconds") or 0.0

    def _is_enough(self, chunks: list[Corpus], stage: Stage) -> bool:
        """Whether the text has the tokens asked for, took its share of the time, or fills the memory for its states."""
        if not chunks:
            return False
        size, padded = sum(chunk.size for chunk in chunks), sum(chunk.tokens.numel() for chunk in chunks)
        if padded * (1 + 1 / len(chunks)) > self.setup.resources.most_tokens:
            return True
        if self.settings.tokens is not None:
            return size >= self.settings.tokens
        seconds, share = self._writing_seconds(), WRITING_SHARE * self.settings.minutes * 60
        stage.total(size * max(1.0, share / seconds))
        return seconds * (1 + 0.5 / len(chunks)) > share  # half of the next chunk would be late

    def _own_text(self, length: int) -> list[Corpus]:
        """The user's text in documents of a row's length; exits are trained on all of its positions."""
        documents: list[Document] = []
        for path in self.settings.text:
            tokens = list(self.setup.engine.tokenizer(path.read_text(encoding="utf-8"))["input_ids"])
            pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
            domains = len(self.setup.domains)
            documents += [Document(piece, 1, len(documents) % domains) for piece in pieces if len(piece) > 16]
        return [Corpus.pack(documents, length)] if documents else []

    # Training

    def _train(self, corpus: Corpus) -> Trained:
        setup, device = self.setup, self.model.device
        uses = heads.token_uses(corpus, len(setup.domains), setup.vocabulary)
        largest = heads.largest_head(setup.vocabulary)
        head_rows = heads.head_of(heads.ordered_rows(uses.sum(0, keepdim=True))[0], largest).to(device)
        with self.display.stage("read", len(corpus)) as stage:
            keep_on = torch.device(setup.resources.states_on)
            features = text_features(self.model, corpus, 2 * setup.recipe.rows, keep_on, stage.advance)
            stage.note = f"the model's hidden states of {corpus.size:,} tokens"
        amounts = {"tokens": float(corpus.predicts.sum())}
        if setup.resources.states_on == device.type:
            corpus = corpus.to(device)
        exits = []
        for layer in setup.layers:
            trainer = Trainer(self.model, layer, corpus, features, head_rows, setup.recipe, steps=1)
            with self.display.stage("train") as stage:
                self._train_exit(trainer, stage)
            exits.append(trainer.exit())
            amounts["steps"] = float(max(trainer.steps, amounts.get("steps", 0)))
            del trainer
            _free_memory(device)
        return Trained(exits, heads.ordered_rows(uses), amounts)

    def _train_exit(self, trainer: Trainer, stage: Stage) -> None:
        """Trains an exit to the end, from the last checkpoint where there is one."""
        name = f"exit-{trainer.student.layer}"
        trainer.steps = self._steps(name, trainer)
        stored = self.work.read_tensors(name)
        if stored is not None:
            trainer.restore(stored)
        stage.total(trainer.steps)
        stage.advance(trainer.step)
        saved = shown = time.perf_counter()
        while trainer.step < trainer.steps:
            trainer.train_step()
            stage.advance(1)
            now = time.perf_counter()
            if now - shown > _SHOWN_SECONDS:
                stage.note, shown = trainer.note(), now
            if now - saved > _CHECKPOINT_SECONDS:
                self.work.write_tensors(name, trainer.state())
                saved = time.perf_counter()
        self.work.write_tensors(name, trainer.state())
        layer = trainer.student.layer
        stage.note = f"after {layer} layer{'s' * (layer != 1)}: {trainer.steps} steps; {trainer.note()}"

    def _steps(self, name: str, trainer: Trainer) -> int:
        """The number of training steps, decided once: as asked for, else as many as fit in the time."""
        decided = self.work.read_json(f"steps-{name}")
        if decided is None:
            decided = self.settings.steps
            if decided is None:
                seconds = TRAINING_SHARE * self.settings.minutes * 60 / len(self.setup.layers)
                decided = max(self.setup.recipe.least_steps, int(seconds / trainer.seconds_per_step()))
            self.work.write_json(f"steps-{name}", decided)
        return decided

    # Measuring

    def _measure(self) -> dict[tuple[str, str], list[Measurement]]:
        """A measurement of every exit, by domain and temperature."""
        setup, seed = self.setup, self.settings.seed
        found: dict[tuple[str, str], list[Measurement]] = {}
        prompts = {domain.name: setup.measuring_prompts(domain) for domain in setup.domains}
        texts = [prompt for of_domain in prompts.values() for prompt in of_domain]
        total = len(TEMPERATURES) * len(texts)
        largest = heads.largest_head(setup.vocabulary)
        with self.display.stage("measure", total) as stage:
            for number, (name, temperature) in enumerate(TEMPERATURES.items()):
                corpus = self.writer.answers(texts, temperature, setup.answer_tokens, seed + number)
                stop = 0
                for index, (domain, of_domain) in enumerate(prompts.items()):
                    start, stop = stop, stop + len(of_domain)
                    answers, head_rows = corpus.rows(slice(start, stop)), self.trained.head_rows(index, largest)
                    found[domain, name] = measure(
                        self.model, self.trained.exits, head_rows, answers, temperature, seed, stage.advance
                    )
            exits = len(self.trained.exits)
            stage.note = f"{exits} exit{'s' * (exits > 1)} on {total} answers"
        _free_memory(self.model.device)
        return found

    def _paths(self, measured: dict[tuple[str, str], list[Measurement]]) -> dict[str, Measured]:
        """Rank paths by domain, then by exit layer, head size and temperature."""
        sizes = heads.head_sizes(self.setup.vocabulary)
        return {
            domain.name: {
                (exit.layer, size, name): Paths(
                    measured[domain.name, name][place].paths(self.trained.head_rows(index, size))
                )
                for place, exit in enumerate(self.trained.exits)
                for size in sizes
                for name in TEMPERATURES
            }
            for index, domain in enumerate(self.setup.domains)
        }

    def _time(self) -> Costs:
        stored = self.work.read_json("costs")
        if stored is not None:
            return {(layer, batch): StepCost(**cost) for layer, batch, cost in stored}
        costs = self._measured_costs(self.setup.engine, self.trained.exits)
        self.work.write_json("costs", [(layer, batch, asdict(cost)) for (layer, batch), cost in costs.items()])
        return costs

    def _measured_costs(self, engine: Engine, exits: list[Exit]) -> Costs:
        costs: Costs = {}
        with self.display.stage("time", len(BATCHES) * (len(exits) + 1), timed=True) as stage:
            head_rows = self.trained.head_rows(0, heads.largest_head(self.setup.vocabulary))
            trimmed = [exit.with_head_rows(head_rows, []) for exit in exits]
            for batch in BATCHES.values():
                of_batch = step_costs(engine, trimmed, batch, stage.advance)
                costs |= {(layer, batch): cost for layer, cost in of_batch.items()}
            stage.note = f"a plain step of one sequence takes {costs[exits[0].layer, 1].plain * 1e3:.2f} ms"
        return costs


def _free_memory(device: torch.device) -> None:
    """Returns GPU memory that torch has cached, so that the engine's kernels can allocate it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
