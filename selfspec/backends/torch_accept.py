"""The model's choice of tokens and the walk down the draft tree, as PyTorch operations."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from selfspec.sampling import NoiseKey, choose, process_logits, reject_or_accept, warp_logits
from selfspec.sequence import Sequence
from selfspec.speculation.draft_tree import Draft


def accept(sequences: list[Sequence], draft: Draft, logits: torch.Tensor) -> tuple[list[list[int]], list[int]]:
    """Walks down from the root: the model chooses the next token; if a child carries it, the walk goes on there.
    Appends tokens one by one up to the end of the sequence. Returns the accepted paths, root first, and of each
    sequence the deepest reached node that the exit drafted (or the root)."""
    trees, drafted = [draft.tree(index) for index in range(len(sequences))], draft.tokens.tolist()
    best = _greedy_tokens(sequences, logits)
    reached: list[list[int]] = [[0] for _ in sequences]  # two where a copied and a drafted node carry the same token
    exit_nodes = [0] * len(sequences)
    walking = list(range(len(sequences)))
    while walking:
        nodes = [reached[index][0] for index in walking]
        if best is not None:
            chosen = [best[index][node] for index, node in zip(walking, nodes, strict=True)]
        else:
            chosen = _choose([sequences[index] for index in walking], walking, nodes, draft, logits)
        still_walking = []
        for index, token in zip(walking, chosen, strict=True):
            sequence = sequences[index]
            carriers = trees[index].matching_children(reached[index], token, drafted[index]) if sequence.drafts else []
            sequence.append(token, drafted=bool(carriers))
            if carriers and not sequence.is_finished:
                reached[index] = carriers
                exit_nodes[index] = carriers[0] if carriers[0] > draft.plan.copied else exit_nodes[index]
                still_walking.append(index)
        walking = still_walking
    return [tree.path(nodes[0]) for tree, nodes in zip(trees, reached, strict=True)], exit_nodes


def _choose(
    sequences: list[Sequence], indices: list[int], nodes: list[int], draft: Draft, logits: torch.Tensor
) -> list[int]:
    """The model's next token for each sequence, after its node; -1 where its logits are not finite."""
    values, params = logits[indices, nodes], [sequence.params for sequence in sequences]  # [R, V]
    texts, prompts = [sequence.tokens for sequence in sequences], [len(sequence.prompt) for sequence in sequences]
    values = process_logits(values, params, texts, prompts)
    if any(sequence.request.uses_host for sequence in sequences):
        values = torch.cat([sequence.process(values[i : i + 1]) for i, sequence in enumerate(sequences)])
    values = warp_logits(values, params)
    key = noise_key(sequences, values.device)
    finite = values.amax(-1).isfinite()
    chosen = choose(torch.where(finite[:, None], values, 0.0), params, key)
    for node in set(nodes) if sequences[0].request.rejection else ():
        children = [child for child in draft.plan.children[node] if child > draft.plan.copied]
        if children:
            at = torch.tensor([i for i, other in enumerate(nodes) if other == node], device=values.device)
            rows = torch.tensor(indices, device=values.device)[at]
            depth, index = draft.at(node)
            ranks = {draft.plan.ranks[child - 1] for child in children}
            offered = [rank in ranks for rank in range(draft.ranked[depth].shape[2])]
            p = values[at].softmax(-1)
            draft_logits, drafted = draft.logits[depth][rows, index], draft.ranked[depth][rows, index]
            chosen[at] = reject_or_accept(p, draft_logits, drafted, offered, key.at(at))
    return torch.where(finite, chosen, -1).tolist()


def _greedy_tokens(sequences: list[Sequence], logits: torch.Tensor) -> list[list[int]] | None:
    """The best token after every node, -1 where its logit is not finite. None if a sequence samples, processes logits
    or has callables or a grammar, which may choose another token."""
    for sequence in sequences:
        if sequence.params.do_sample or sequence.params.changes_logits or sequence.request.uses_host:
            return None
    best = logits.argmax(-1)
    finite = logits.gather(-1, best[..., None])[..., 0].isfinite()
    return torch.where(finite, best, -1).tolist()


def noise_key(sequences: Seq[Sequence], device: torch.device, ahead: int = 0, repeat: int = 1) -> NoiseKey:
    """The noise of the tokens `ahead` positions after each sequence's next one, `repeat` rows per sequence."""
    columns = [(sequence.seed, sequence.sample_index, len(sequence.tokens) + ahead) for sequence in sequences]
    seeds, sample_indices, positions = torch.tensor(columns, device=device).repeat_interleave(repeat, dim=0).unbind(1)
    return NoiseKey(seeds, sample_indices, positions)
