"""Executes steps as Triton kernels in CUDA graphs.

On the host, from launching a step to reading it:
    backend.py         launches and reads the steps of one batch; start here
    placement.py       which sequence takes which slot; pages taken ahead
    prompts.py         which prompts share a prefill pass
    callables.py       steps in which Python callables process logits
    masking.py         steps with grammars: the host's masks between captured parts
    readback.py        results on their way to the host; times of steps
    graphs.py          captures steps and passes, and replays them
    warmup.py, compiler.py   capture and compile ahead

On the device, as kernels over fixed buffers:
    slots.py           slots: lengths, pages, newest tokens, sampling parameters
    step.py            one step: draft, verify, choose, accept, commit
    step_masks.py      masks, forced and drafted tokens between host and device
    decoder.py         the model's layers
    exit.py            the exit: features, exit block, draft tokens
    exit_scoring.py    fills the exit's KV of plainly decoded tokens, scores its drafts
    prompt_scoring.py  scores the exit at the end of prompts
    kernel_prefill.py  prompts by the decode kernels, several in one pass
    torch_prefill.py   a chunk of a longer prompt, as PyTorch operations
"""
