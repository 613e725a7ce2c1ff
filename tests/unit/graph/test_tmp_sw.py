import pytest, torch
from torch import nn
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import build
from tests.unit.graph.lockstep import assert_parity
from merak.graph.trace.opaque.operator import opaque_nodes
from merak.graph.tensor_parallel.apply import tensor_parallel

@pytest.mark.parametrize("degree",[2,4])
def test_switch(degree, monkeypatch):
    m=build("switch"); c=cases.batch(padded=False)
    g=cases.traced(m,c)
    w=tensor_parallel(g,None,degree).weights
    print({n:(p.dim) for n,p in w.items() if 'expert' in n}); print([n for n in g.parameters if n not in w])
    assert_parity(m,c,None,degree,monkeypatch)

class Loop(nn.Module):
    def __init__(s, n=4, d=16):
        super().__init__(); s.experts=nn.ModuleList(nn.Sequential(nn.Linear(d,32),nn.GELU(),nn.Dropout(0.0),nn.Linear(32,d)) for _ in range(n))
    def forward(s, h, idx, w):
        out=torch.zeros_like(h)
        for e,m in enumerate(s.experts):
            rows,nth=torch.where(idx==e)
            out.index_add_(0,rows,m(h[rows])*w[rows,nth,None])
        return out
class Block(nn.Module):
    def __init__(s):
        super().__init__(); s.gate=nn.Linear(16,4); s.mlp=Loop(); s.norm=nn.LayerNorm(16)
    def forward(s,x):
        h=s.norm(x).view(-1,16); w,i=s.gate(h).softmax(-1).topk(2,-1)
        return x+s.mlp(h,i,w).view_as(x)
class M(nn.Module):
    def __init__(s):
        super().__init__(); s.stem=nn.Linear(16,16); s.layers=nn.ModuleList(Block() for _ in range(2)); s.head=nn.Linear(16,3)
    def forward(s,x):
        h=s.stem(x)
        for l in s.layers: h=l(h)
        return {"loss": s.head(h).square().mean()}
@pytest.mark.parametrize("degree",[2])
def test_loop(degree, monkeypatch):
    torch.manual_seed(0); m=M(); c={"x":torch.randn(2,6,16)}
    g=cases.traced(m,c); assert not opaque_nodes(g)
    w=tensor_parallel(g,None,degree).weights
    print({n:(p.dim) for n,p in w.items() if 'expert' in n}); print([n for n in g.parameters if n not in w])
    assert_parity(m,c,None,degree,monkeypatch)
