"""A plan written by hand: an embedding on the first stage, a linear head with its loss on the last, data parallel 2."""

from __future__ import annotations

from titan.compiler.plan.program import Plan
from titan.compiler.plan.text import parse_plan

VOCABULARY, HIDDEN, SEQUENCE, GLOBAL_BATCH = 8, 4, 6, 4

_PLAN = """titan plan 1

set train.sequence 6
set train.global_batch 4
set train.micro_batch 1
set train.micro_batches 2
set train.learning_rate 0.01
set train.min_learning_rate 0.001
set train.warmup_steps 2
set train.steps 10
set train.schedule "cosine"
set train.beta1 0.9
set train.beta2 0.95
set train.eps 1e-8
set train.weight_decay 0.1
set train.clip {clip}
set train.seed 7

mesh pipeline=2 data=2
group all pipeline*data

tensor tokens i64[1,6]
tensor labels i64[1,6]
tensor count.local {s}[]
tensor count {s}[]
tensor x {d}[1,6,4]
tensor d.x {d}[1,6,4]
tensor loss {s}[]
tensor d.loss {s}[]
tensor nsq.local {s}[]
tensor nsq {s}[]
tensor loss.all {s}[]

bucket embed {d}[32] replicas=data {sharded}homes=0
bucket head {d}[36] replicas=data {sharded}homes=1

parameter embed.weight [8,4] rows=8 {d}[8,4] bucket=embed +0 decay init=normal:0.5
parameter head.weight [8,4] rows=8 {d}[8,4] bucket=head +0 decay init=normal:0.5
parameter final.weight [4] rows=4 {d}[4] bucket=head +32 init=ones

segment embed
  inputs tokens
  parameters embed.weight
  outputs x
  value tokens i64[1,6]
  value embed.weight {d}[8,4]
  value x {d}[1,6,4]
  x = embedding tokens embed.weight start=0

segment head
  inputs x labels count
  parameters final.weight head.weight
  outputs loss
  value x {d}[1,6,4]
  value labels i64[1,6]
  value count {s}[]
  value final.weight {d}[4]
  value head.weight {d}[8,4]
  value normed {d}[1,6,4]
  value rstd {s}[1,6]
  value logits {d}[1,6,8]
  value peak {s}[1,6]
  value total {s}[1,6]
  value target {s}[1,6]
  value loss {s}[]
  normed rstd = rms_norm x final.weight eps=1e-5
  logits = linear normed head.weight
  peak = vocab_max logits start=0 vocab=8
  total target = vocab_sum logits labels peak start=0 vocab=8
  loss = token_loss peak total target labels count

role pipeline=0 chunks=1 layers=
buffer p.embed parameters {d}[32]
buffer g.embed gradients {s}[32]
buffer o.embed optimizer {s}[{o_embed}]
block begin
  - zero_grad ^g.embed
block F i
  - load_batch tokens:i what=tokens micro_batch=i start=0 length=6
  - forward embed x:i <- tokens:i p.embed
  - send t.x:i? <- x:i @pipeline !act peer=1
  - wait <- t.x:i?
  - free <- x:i
block B i
  - recv d.x:i? @pipeline !grad peer=1
  - wait d.x:i <- d.x:i?
  - backward embed <- d.x:i tokens:i p.embed ^g.embed
  - free <- d.x:i tokens:i
block end
  - reduce_grad u.g.embed? ^g.embed @data !data.reduce mode={mode}
  - wait <- u.g.embed?
  - grad_norm nsq.local <- g.embed
  - all_reduce nsq? <- nsq.local @all !all op=sum
  - wait nsq <- nsq?
  - optimizer_step ^p.embed ^o.embed <- g.embed nsq
  - report <- nsq name=grad_norm
  - free <- nsq.local nsq
{unshard_embed}order train
  begin F(0..1) B(0..1) end
{unshard}
role pipeline=1 chunks=1 layers=
buffer p.head parameters {d}[36]
buffer g.head gradients {s}[36]
buffer o.head optimizer {s}[{o_head}]
buffer b.loss metric {s}[1]
block begin
  - zero_grad ^g.head
  - load_batch count.local what=count
  - all_reduce count? <- count.local @data !data.reduce op=sum
  - wait count <- count?
block F i
  - recv x:i? @pipeline !act peer=-1
  - load_batch labels:i what=labels micro_batch=i start=0 length=6
  - wait x:i <- x:i?
  - forward head loss:i f.head:i <- x:i labels:i count p.head
  - loss d.loss:i <- loss:i ^b.loss
block B i
{backward}
  - send t.d.x:i? <- d.x:i @pipeline !grad peer=-1
  - wait <- t.d.x:i?
  - free <- d.x:i d.loss:i x:i labels:i loss:i f.head:i{w}
block end
  - reduce_grad u.g.head? ^g.head @data !data.reduce mode={mode}
  - wait <- u.g.head?
  - grad_norm nsq.local <- g.head
  - all_reduce nsq? <- nsq.local @all !all op=sum
  - all_reduce loss.all? <- b.loss @data !data.reduce op=sum
  - wait nsq <- nsq?
  - wait loss.all <- loss.all?
  - optimizer_step ^p.head ^o.head <- g.head nsq
  - report <- nsq name=grad_norm
  - report <- loss.all name=loss
  - free <- nsq.local nsq loss.all count.local count
  - zero_grad ^b.loss
{unshard_head}order train
  begin F(0..1) B(0..1) end
{unshard}"""


def hand_plan(dtype: str = "f64", sharded: bool = False, clip: str = "0.5") -> Plan:
    """4 ranks: 2 stages, 2 data ranks, micro-batches of one sequence, GPipe on the first stage."""
    return parse_plan(hand_text(dtype, sharded, clip))


def hand_text(dtype: str = "f64", sharded: bool = False, clip: str = "0.5", split: bool = False) -> str:
    """The plan's text, for tests that damage it. `split`: the head's backward in two halves."""
    statistic, states = "f64" if dtype == "f64" else "f32", 3 if dtype == "bf16" else 2
    unshard = "block gather\n  - unshard u.p.{0}? ^p.{0} @data !data.gather\n  - wait <- u.p.{0}?\n"
    text = _PLAN.format(
        d=dtype,
        s=statistic,
        clip=clip,
        sharded="shards=data sharded=o " if sharded else "uncounted=data ",
        mode="reduce_scatter" if sharded else "all_reduce",
        o_embed=32 * states // (1 + sharded),
        o_head=36 * states // (1 + sharded),
        unshard="  gather\n" if sharded else "",
        unshard_embed=unshard.format("embed") if sharded else "",
        unshard_head=unshard.format("head") if sharded else "",
        backward=_SPLIT if split else _BACKWARD,
        w=" wf.head:i" if split else "",
    )
    return _numbered(text)


def _numbered(text: str) -> str:
    """Instruction lines begin with `-`; each block counts its own from 0."""
    lines, count = [], 0
    for line in text.splitlines():
        if line.startswith("block"):
            count = 0
        if line.startswith("  - "):
            line, count = f"{count:4}  {line[4:]}", count + 1
        lines.append(line)
    return "\n".join(lines) + "\n"


_OPERANDS = "x:i labels:i count f.head:i p.head ^g.head"
_BACKWARD = f"  - backward head d.x:i <- d.loss:i {_OPERANDS}"
_SPLIT = (
    f"  - backward_input head d.x:i wf.head:i <- d.loss:i {_OPERANDS}\n  - backward_weight head <- wf.head:i ^g.head"
)
