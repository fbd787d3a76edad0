"""A run with everything in it that an input log must hold, recorded by one process."""

import math

from paxserve import SamplingParams
from paxserve.config import EngineConfig
from paxserve.engine import Engine

ABORTED = "5"
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.0, max_tokens=9),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, max_tokens=20, n=2),
    SamplingParams(temperature=0.7, seed=3, min_p=0.01, repetition_penalty=1.2, max_tokens=15),
    SamplingParams(temperature=0, max_tokens=10, logit_bias={7: -math.inf, 9: 2.0}, stop_token_ids=[11], min_tokens=3),
    SamplingParams(temperature=0.5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.5, max_tokens=6),
]


def record_run(model, file, options):
    """Outputs by request id. Half of the requests come while others run, and one is aborted after its fourth token."""
    engine = Engine(EngineConfig(model=str(model), record=str(file), **options))
    waiting = list(enumerate(PARAMS))
    outputs = {}
    steps = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (len(waiting) > 3 or steps > 4):
            number, params = waiting.pop(0)
            prompt = [1 + number, 50, *range(number, 3 * number + 20)]
            engine.add_request(str(number), prompt, params, priority=number % 2)
        outputs |= {output.request_id: output for output in engine.step()}
        steps += 1
        aborted = outputs.get(ABORTED)
        if aborted is not None and not aborted.finished and len(aborted.outputs[0].token_ids) == 4:
            outputs[ABORTED] = engine.abort_request(ABORTED)
    engine.close()
    return outputs
