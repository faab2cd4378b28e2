"""Executes steps as Triton kernels in CUDA graphs.

On the host, from launching a step to reading it:
    backend.py         launches and reads the steps of one batch; start here
    placement.py       which sequence takes which slot; pages taken ahead
    prompts.py         which prompts share a prefill pass
    callables.py       steps in which Python callables process logits
    readback.py        results on their way to the host; times of steps
    graphs.py          captures steps and passes, and replays them
    warmup.py, compiler.py   capture and compile ahead

On the device, as kernels over fixed buffers:
    slots.py           slots: lengths, pages, newest tokens, sampling parameters
    step.py            one step: draft, verify, choose, accept, commit
    decoder.py         the model's layers
    exit.py            the exit: features, exit block, draft tokens
    exit_scoring.py    fills the exit's KV of plainly decoded tokens, scores its drafts
    prompt_scoring.py  scores the exit at the end of prompts
    short_prefill.py   several short prompts in one pass
    prefill.py         one chunk of a longer prompt
"""
