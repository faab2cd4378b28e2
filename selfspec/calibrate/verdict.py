"""States in one sentence whether a profile makes decoding faster."""

from __future__ import annotations

from selfspec.profiles.profile import Profile, Run
from selfspec.speculation.plan import Plan


def verdict(profile: Profile) -> str:
    """The speed of one greedy sequence in each domain, relative to plain decoding; or that no plan is faster."""
    greedy = {name: choice.plans.get("0", {}).get("1") for name, choice in profile.domains.items()}
    drafting = {name: choice for name, choice in greedy.items() if choice is not None and len(Plan.parse(choice.plan))}
    known = {name: of.speedup for name, choice in drafting.items() if (of := choice.measured or choice.expected)}
    faster = {name: speedup for name, speedup in known.items() if speedup > 1}
    if faster:
        be = "is" if all(drafting[name].measured for name in faster) else "is expected to be"
        figures = ", ".join(f"{speedup:.2f}x as fast on {name}" for name, speedup in faster.items())
        plain = [name for name in profile.domains if name not in faster]
        rest = f"; no plan is faster on {', '.join(plain)}" if plain else ""
        return f"For one greedy sequence, drafting {be} faster than plain decoding: {figures}{rest}."
    runs = [(run.speedup, run.plan, name) for name in profile.domains for run in _runs(profile, name)]
    if not runs and not known:
        return "The plans of this profile were not measured: how fast they are is not known."
    where = f" on {profile.device.name}" if profile.device else ""
    if profile.drafts and not known:
        return f"For one greedy sequence, no plan is faster than plain decoding{where}; in other cases some are."
    tried = ""
    for speedup, plan, name in sorted(run for run in runs if run[0] <= 1)[-1:]:
        tried = f": the fastest that was tried, {_short(plan)} on {name}, is {speedup:.2f}x as fast"
    return f"No plan is faster than plain decoding{where}{tried}."


def _short(plan: str) -> str:
    """A plan as text; long trees by their size."""
    parsed = Plan.parse(plan)
    return plan if len(plan) <= 20 else f"a tree of {len(parsed)} nodes and depth {parsed.depth}"


def _runs(profile: Profile, name: str) -> list[Run]:
    """All measurements of a domain's plans."""
    choice = profile.domains[name]
    runs = [choice.chain, *(of.measured for of_batch in choice.plans.values() for of in of_batch.values())]
    return [run for run in runs if run is not None]
