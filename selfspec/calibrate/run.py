"""A calibration from beginning to end: load, write, train, measure, time, choose, try, save.

Each stage leaves its result in the work folder and is skipped when it is already there, so that a stopped run goes on
where it was. What the stages do is their modules' business; how the outcome looks is `outcome`'s.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any

import torch

from selfspec.calibrate import heads, outcome
from selfspec.calibrate.choice import Paths, choose
from selfspec.calibrate.corpus import Corpus, Document, recalled_states
from selfspec.calibrate.display import Display, Stage
from selfspec.calibrate.measuring import Answers, Measurement, measure
from selfspec.calibrate.prompts import Domain, Prompt, parse_domain, shipped_domains
from selfspec.calibrate.resources import Resources, fit
from selfspec.calibrate.settings import TRAINING_SHARE, WRITING_SHARE, Settings
from selfspec.calibrate.timing import step_costs
from selfspec.calibrate.training import Recipe, Trainer
from selfspec.calibrate.work import FOLDER, Work
from selfspec.calibrate.writing import Template, Writer, write_answers
from selfspec.engine import Engine
from selfspec.governor.costs import StepCost
from selfspec.governor.rules import BATCHES, TEMPERATURES
from selfspec.memory import limit_memory
from selfspec.models.loading import pick_device
from selfspec.profiles.paths import profiles_dir
from selfspec.profiles.profile import ModelIdentity, Profile
from selfspec.speculation.exit import Exit
from selfspec.text import encode

Costs = dict[tuple[int, int], StepCost]  # by exit layer and batch

_CHECKPOINT_SECONDS = 30.0
# Prompts of a domain that are measured with, and tokens of their answers; fewer where a GPU does not answer them all
# at once.
_MEASURED, _MEASURED_WITHOUT_GPU = (24, 128), (6, 48)
_DISK_BYTES = 2 * 2**30
_ROUTER_LAYER = 3


class Calibration:
    """One calibration of one model. `timings` replaces the measuring of step costs."""

    def __init__(
        self, settings: Settings, display: Display, timings: Callable[[Engine, list[Exit]], Costs] | None = None
    ) -> None:
        self.settings, self.display, self._timings = settings, display, timings
        self.checkpoint_seconds = _CHECKPOINT_SECONDS
        self.domains = [parse_domain(text) for text in settings.domains] or shipped_domains()
        if len({domain.name for domain in self.domains}) < len(self.domains):
            raise ValueError("two domains have the same name; give each --domain a name of its own")

    def run(self) -> Profile:
        self._open()
        if self.known is None:
            corpus = self._write()
            self.order = heads.ordered_rows(heads.token_uses(corpus, len(self.domains), self.vocabulary))
            self.trained = {"tokens": float(corpus.predicts.sum())}
            self.exits = self._train(corpus)
        else:
            self._take_over(self.known)
        measured = self._measure()
        costs = self._time()
        paths, sizes = self._paths(measured)
        choices = {d.name: choose(paths[d.name], costs, self.settings.objective) for d in self.domains}
        profile = outcome.build(self, measured, paths, costs, choices, sizes)
        profile = outcome.try_out(self, profile, costs[self.exits[0].layer, 1].plain)
        self.work.remove()
        return profile

    # Opening

    def _open(self) -> None:
        """Loads the model, plans for the memory there is, and says what will be done."""
        settings = self.settings
        if settings.memory_gb is not None:
            limit_memory(settings.memory_gb, pick_device(settings.device))
        self.engine = Engine.from_pretrained(settings.model, settings.device, settings.dtype, profile=None)
        self.model = self.engine.model
        if self.engine.tokenizer is None:
            raise ValueError(f"{settings.model} has no tokenizer, and prompts are text: add one to its folder")
        self.vocabulary = self.model.config.vocab_size
        self.layers = settings.exit_layers(self.model.config.num_layers)
        self.recipe = Recipe.for_device(self.model.device, self.engine.context, settings.seed)
        self.template = Template.of(self.engine.tokenizer)
        self.identity = ModelIdentity.of(self.model)
        self.out = settings.out or profiles_dir() / self.identity.name
        key: dict[str, Any] = {
            name: str(value) for name, value in asdict(settings).items() if name not in ("resume", "restart", "out")
        }
        key |= {"fingerprint": self.identity.fingerprint, "prompts": [d.training for d in self.domains]}
        key |= {"text": [sha256(path.read_bytes()).hexdigest() for path in settings.text]}
        self.known = None if settings.train else self._known_profile()
        self.work = Work(self.out / FOLDER, key, settings.resume, settings.restart)
        _check_disk(self.out)
        self.resources = self._resources()
        self.recipe = replace(self.recipe, rows=self.resources.training_rows)
        self._announce(self.resources)

    def _resources(self) -> Resources:
        """What fits; a run that goes on keeps the sizes it began with."""
        stored = self.work.read_json("resources")
        if stored is not None:
            return Resources(**stored)
        resources = fit(self.model, len(self.layers), self.recipe, heads.largest_head(self.vocabulary))
        self.work.write_json("resources", asdict(resources))
        return resources

    def _announce(self, resources: Resources) -> None:
        settings, config = self.settings, self.model.config
        self.display.say(
            f"Calibrating {settings.model} ({config.model_type}, {config.num_layers} layers, vocabulary "
            f"{config.vocab_size:,}) on {outcome.device_name(self.model)} in {str(self.model.dtype).split('.')[-1]}"
        )
        train = "trains exits" if settings.train else "takes the trained exits"
        self.display.say(
            f"  domains {', '.join(d.name for d in self.domains)}; {train} after layers "
            f"{', '.join(map(str, self.layers))}; writes its profile to {self.out}"
        )
        if settings.train:
            self.display.say(f"  {resources.describe()}")
        if settings.resume and not self.work.resumed:
            self.display.say(f"  there is nothing to go on with in {self.work.folder}: begins anew")
        if settings.tokens is None or settings.steps is None:
            minutes = "a minute" if settings.minutes == 1 else f"{settings.minutes:g} minutes"
            self.display.say(
                f"  about {minutes}, and then a few to measure and try; stopped at any time, --resume goes on"
            )
            if settings.train and self.model.device.type == "cpu":
                self.display.say(
                    "  on a CPU that trains too little to be of use: --no-train takes exits that are there"
                )

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """A prompt as tokens: through the chat template where there is one."""
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str) and not getattr(tokenizer, "chat_template", None):
            prompt = "\n".join(message["content"] for message in prompt)
        return encode(tokenizer, prompt)

    def fitting(self, name: str, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Prompts as tokens, without those that leave too little of the model's context for an answer."""
        tokens = [self.tokens_of(prompt) for prompt in prompts]
        fitting = [prompt for prompt in tokens if len(prompt) <= self.engine.context // 2]
        if not fitting:
            raise ValueError(f"domain {name!r}: every prompt is longer than half of the model's context")
        return fitting

    def measuring_prompts(self, domain: Domain) -> list[list[int]]:
        return self.fitting(domain.name, domain.measuring)[: self._measured[0]]

    @property
    def _measured(self) -> tuple[int, int]:
        return _MEASURED if self.model.device.type == "cuda" else _MEASURED_WITHOUT_GPU

    # Writing

    def _write(self) -> Corpus:
        length, rows = self.recipe.length, self.resources.writing_rows
        if self.settings.tokens is not None:
            rows = min(rows, 8 * ceil(self.settings.tokens / length / 8))
        prompts = [self.fitting(domain.name, domain.training) for domain in self.domains]
        parts: list[Corpus] = []
        with self.display.stage("write") as stage:
            writer = Writer(self.model, prompts, self.template, self.ends, rows, length, self.settings.seed)
            began = time.perf_counter()
            while len(parts) < self._chunks(parts, rows * length, time.perf_counter() - began, stage):
                parts.append(self._chunk(writer, len(parts), stage))
            corpus = Corpus.join([*parts, *self._own_text(length)])
            own = int(corpus.predicts.sum())
            stage.note = f"{corpus.tokens.numel() / 1e6:.2f} M tokens, {own / 1e6:.2f} M of them the model's own"
        del writer
        _free(self.model)
        return corpus

    @property
    def ends(self) -> list[int]:
        ends = self.engine.generation_config.eos_token_id
        return list(ends) if isinstance(ends, list | tuple) else [] if ends is None else [ends]

    def _chunks(self, parts: list[Corpus], size: int, seconds: float, stage: Stage) -> int:
        """How many chunks to write, decided once: by the tokens asked for, or by how long the first one took."""
        decided = self.work.read_json("chunks")
        if decided is None and (parts or self.settings.tokens is not None):
            if self.settings.tokens is not None:
                decided = ceil(self.settings.tokens / size)
            else:
                decided = round(WRITING_SHARE * self.settings.minutes * 60 / seconds)
            decided = max(1, min(decided, self.resources.most_tokens // size))
            self.work.write_json("chunks", decided)
        stage.total((decided or 1) * size)
        return decided or 1

    def _chunk(self, writer: Writer, number: int, stage: Stage) -> Corpus:
        name = f"chunk-{number:04d}"
        # Before the number of chunks is decided the first one is written anew, since it is timed for that.
        stored = self.work.read_tensors(name) if self.work.read_json("chunks") is not None else None
        if stored is not None:
            stage.advance(stored["tokens"].numel())
            return Corpus.from_small(stored)
        chunk = writer.chunk(number, lambda count: stage.advance(count, f"chunk {number + 1}"))
        self.work.write_tensors(name, chunk.small())
        return chunk

    def _own_text(self, length: int) -> list[Corpus]:
        """The user's text, in pieces of a row's length; the model is asked for its distribution everywhere in it."""
        documents: list[Document] = []
        for path in self.settings.text:
            tokens = list(self.engine.tokenizer(path.read_text(encoding="utf-8"))["input_ids"])
            pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
            documents += [Document(piece, 1, len(documents) % len(self.domains)) for piece in pieces if len(piece) > 16]
        return [Corpus.pack(documents, length)] if documents else []

    # Training

    def _train(self, corpus: Corpus) -> list[Exit]:
        used = heads.token_uses(corpus, len(self.domains), self.vocabulary).sum(0, keepdim=True)
        head_rows = heads.head_of(heads.ordered_rows(used)[0], heads.largest_head(self.vocabulary))
        with self.display.stage("read", total=len(corpus)) as stage:
            keep_on = torch.device(self.resources.states_on)
            recalled = recalled_states(self.model, corpus, 2 * self.recipe.rows, keep_on, stage.advance)
            stage.note = f"the model's own states at {corpus.tokens.numel() / 1e6:.2f} M tokens"
        together = self.resources.exits_together
        groups = [self.layers[start : start + together] for start in range(0, len(self.layers), together)]
        if self.resources.states_on == self.model.device.type:
            corpus = corpus.to(self.model.device)
        exits: list[Exit] = []
        for group in groups:
            exits += self._train_group(group, len(groups), corpus, recalled, head_rows.to(self.model.device))
        del recalled
        _free(self.model)
        return exits

    def _train_group(
        self, layers: list[int], groups: int, corpus: Corpus, recalled: torch.Tensor, head_rows: torch.Tensor
    ) -> list[Exit]:
        name = "exits-" + "-".join(map(str, layers))
        trainer = Trainer(self.model, layers, corpus, recalled, head_rows, self.recipe, steps=1)
        with self.display.stage("train") as stage:
            trainer.steps = self._steps(name, trainer, groups)
            stored = self.work.read_tensors(name)
            if stored is not None:
                trainer.restore(stored)
            stage.total(trainer.steps)
            stage.advance(trainer.step, "")
            saved = shown = time.perf_counter()
            while trainer.step < trainer.steps:
                trainer.train_step()
                now = time.perf_counter()
                stage.advance(1, _training_note(trainer) if now - shown > 0.5 else None)
                shown = now if now - shown > 0.5 else shown
                if now - saved > self.checkpoint_seconds:
                    self.work.write_tensors(name, trainer.state())
                    saved = time.perf_counter()
            self.work.write_tensors(name, trainer.state())
            stage.note = f"{trainer.steps} steps; {_training_note(trainer)}"
        exits = trainer.exits()
        self.trained["steps"] = float(max(trainer.steps, self.trained.get("steps", 0)))
        del trainer
        _free(self.model)
        return exits

    def _steps(self, name: str, trainer: Trainer, groups: int) -> int:
        """How many steps to train for, decided once: as asked for, or what fits the time; leaves the trainer new."""
        decided = self.work.read_json(f"steps-{name}")
        if decided is None:
            decided = self.settings.steps
            if decided is None:
                seconds = TRAINING_SHARE * self.settings.minutes * 60 / groups
                decided = max(20, int(seconds / trainer.seconds_per_step()))
            self.work.write_json(f"steps-{name}", decided)
        return decided

    def _known_profile(self) -> Profile:
        """A profile that is there already, for its exits."""
        known = Profile.load(self.out) if (self.out / "profile.json").exists() else Profile.find(self.model)
        layers = known.trained_layers() if known is not None else []
        if known is None or not layers:
            raise ValueError("there are no trained exits for this model yet: leave out --no-train")
        known.check(self.model)
        self.layers = [layer for layer in layers if not self.settings.exits or layer in self.settings.exits]
        if not self.layers:
            raise ValueError(f"the profile has exits after layers {layers}, none of those asked for with --exits")
        return known

    def _take_over(self, known: Profile) -> None:
        """Exits as they are, and heads: a domain's own, or, for one the profile does not know, all of them together."""
        self.exits = [known.exit(self.model, layer) for layer in self.layers]
        self.trained = {name: value for name, value in known.trained.items() if name in ("tokens", "steps")}
        rows = {name: known.head_rows(self.model, name) for name in known.domains}
        uses = torch.zeros(len(self.domains), self.vocabulary, dtype=torch.float64)
        for index, domain in enumerate(self.domains):
            for own in [rows[domain.name]] if domain.name in rows else rows.values():
                uses[index, slice(None) if own is None else own.cpu()] += 1
        self.order = heads.ordered_rows(uses)

    # Measuring

    @property
    def router_layer(self) -> int:
        """Prompts are told apart by what a shallow layer sees, which costs little, though not the first one."""
        return min(max(_ROUTER_LAYER, *self.layers), self.model.config.num_layers - 1)

    def _measure(self) -> dict[tuple[str, str], list[Measurement]]:
        """What every exit does on every domain's measuring prompts, by domain and temperature."""
        found: dict[tuple[str, str], list[Measurement]] = {}
        prompts = {domain.name: self.measuring_prompts(domain) for domain in self.domains}
        total = len(TEMPERATURES) * sum(map(len, prompts.values()))
        with self.display.stage("measure", total=total) as stage:
            for number, (name, temperature) in enumerate(TEMPERATURES.items()):
                texts = [prompt for of_domain in prompts.values() for prompt in of_domain]
                seed, temperatures = self.settings.seed + number, [temperature] * len(texts)
                corpus = write_answers(
                    self.model, self.template, self.ends, texts, temperatures, self._measured[1], seed
                )
                stop = 0
                for index, domain in enumerate(self.domains):
                    start, stop = stop, stop + len(prompts[domain.name])
                    answers = Answers(temperature, corpus.rows(slice(start, stop)))
                    largest = self.head_rows(index, heads.largest_head(self.vocabulary))
                    found[domain.name, name] = measure(
                        self.model, self.exits, largest, answers, self.settings.seed, stage.advance
                    )
            stage.note = f"{len(self.exits)} exit{'s' * (len(self.exits) > 1)} on {total} answers"
        _free(self.model)
        return found

    def head_rows(self, domain: int, size: int) -> torch.Tensor | None:
        """The rows of a domain's head of some size; None: all."""
        if size >= self.vocabulary:
            return None
        return heads.head_of(self.order[domain], size).to(self.model.device)

    def _paths(
        self, measured: dict[tuple[str, str], list[Measurement]]
    ) -> tuple[dict[str, dict[tuple[int, int, str], Paths]], list[int]]:
        """Paths by domain, then by exit, head size and temperature; and the head sizes."""
        largest = heads.largest_head(self.vocabulary)
        sizes = [largest] if largest == self.vocabulary else [largest, largest // 2, largest // 4]
        paths: dict[str, dict[tuple[int, int, str], Paths]] = {}
        for index, domain in enumerate(self.domains):
            paths[domain.name] = {
                (exit.layer, size, name): Paths(measured[domain.name, name][place].paths(self.head_rows(index, size)))
                for place, exit in enumerate(self.exits)
                for size in sizes
                for name in TEMPERATURES
            }
        return paths, sizes

    def _time(self) -> Costs:
        stored = self.work.read_json("costs")
        if stored is not None:
            return {(layer, batch): StepCost(**cost) for layer, batch, cost in stored}
        costs = self._timings(self.engine, self.exits) if self._timings else self._measured_costs()
        self.work.write_json("costs", [(layer, batch, asdict(cost)) for (layer, batch), cost in costs.items()])
        return costs

    def _measured_costs(self) -> Costs:
        costs: Costs = {}
        with self.display.stage("time", len(BATCHES) * (len(self.exits) + 1), timed=True) as stage:
            rows = self.head_rows(0, heads.largest_head(self.vocabulary))
            exits = [exit.offering(rows, []) for exit in self.exits]
            for batch in BATCHES.values():
                of_batch = step_costs(self.engine, exits, batch, stage.advance)
                costs |= {(layer, batch): cost for layer, cost in of_batch.items()}
            plain = costs[self.exits[0].layer, 1].plain
            stage.note = f"a plain step of one row takes {plain * 1e3:.2f} ms"
        return costs


def _training_note(trainer: Trainer) -> str:
    loss, right = trainer.seen[:, :, 0].tolist()
    pairs = zip(trainer.students, right, strict=True)
    agreement = ", ".join(f"{share:.2f} ({student.layer})" for student, share in pairs)
    left_out = int(trainer.left_out.sum())
    note = f", {left_out} steps without a finite gradient left out" if left_out else ""
    return f"loss {sum(loss) / len(loss):.3f}, agreement by exit {agreement}{note}"


def _check_disk(out: Path) -> None:
    free = shutil.disk_usage(out).free
    if free < _DISK_BYTES:
        raise ValueError(
            f"only {free / 1e9:.1f} GB are free where {out} lies, and calibration wants {_DISK_BYTES / 1e9:.0f} GB for "
            "its work: free some space, or choose another folder with --out"
        )


def _free(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
