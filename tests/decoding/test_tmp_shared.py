import numpy as np, pytest
from tests.decoding.test_schedule_law import *
from tests.decoding.test_schedule_law import costs as mk
from tests.decoding.loads import answers, fit, answer_law
def test_x(target, drafters):
    for same_prompt in (True, False):
      for adv in (True, False):
        d = trusting(drafters["markov"], ADVERSARY) if adv else drafters["markov"]
        prompts=[[3]]*3 if same_prompt else [[3],[2],[0]]
        ps=[PARAMS[0]]*3
        laws=[answer_law(target,p[0],PARAMS[0]) for p in prompts]
        for s in ("threshold:0.5","load_aware","load_aware_async","dcut"):
          for shared in (True,False):
            out=answers(target,d,prompts,ps,mk(),sampler="rejection",planner=s,shared_seeds=shared)
            print(same_prompt,adv,s,"shared" if shared else "own", [float(f"{fit(out.tokens[:,i],laws[i]):.2g}") for i in range(3)],out.shares().round(2))
