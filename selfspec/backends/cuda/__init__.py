"""Executes steps as Triton kernels in CUDA graphs.

Host code:
    backend.py         launches and reads the steps of one batch; start here
    placement.py       gives sequences slots, reserves their pages ahead
    prompts.py         chooses the prompts that share a prefill pass
    callables.py       runs steps in which Python callables process logits
    masking.py         runs steps with grammars: computes masks between captured parts
    readback.py        copies results to the host, measures the times of steps
    graphs.py          captures steps and passes as graphs
    warmup.py, compiler.py   capture and compile ahead of the first request

Device work, as kernels over buffers with fixed addresses:
    slots.py           slots: lengths, pages, newest tokens, sampling parameters
    step.py            one step: draft, verify, choose, accept, commit
    step_draft.py      its draft: runs the nodes level by level
    step_masks.py      its buffers of masks, forced tokens and drafted tokens
    decoder.py         the model's layers
    exit.py            the exit: features, exit block, draft tokens
    exit_scoring.py    fills the exit's KV for plainly decoded tokens, scores its drafts
    prompt_scoring.py  scores the exit on the last positions of prompts
    kernel_prefill.py  prefills prompts with the decode kernels, several in one pass
    torch_prefill.py   prefills one chunk of a longer prompt with PyTorch operations
"""
