import pytest, torch
from torch import nn
import torch.nn.functional as F
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity
from merak.graph.trace.opaque.operator import opaque_nodes
from merak.graph.tensor_parallel.apply import tensor_parallel
D,E=16,4
class FFN(nn.Module):
    def __init__(s): super().__init__(); s.w1=nn.Linear(D,32,bias=False); s.w2=nn.Linear(32,D,bias=False); s.w3=nn.Linear(D,32,bias=False)
    def forward(s,x): return s.w2(F.silu(s.w1(x))*s.w3(x))
class Base(nn.Module):
    def __init__(s):
        super().__init__(); s.gate=nn.Linear(D,E,bias=False); s.experts=nn.ModuleList(FFN() for _ in range(E)); s.shared=FFN()
class Mistral(Base):  # mistral-inference
    def forward(s, inputs):
        x=inputs.view(-1,D)
        gl=s.gate(x); weights,sel=torch.topk(gl,2); weights=F.softmax(weights,dim=1,dtype=torch.float).to(x.dtype)
        results=torch.zeros_like(x)
        for i,expert in enumerate(s.experts):
            b,n=torch.where(sel==i)
            results[b]+=weights[b,n,None]*expert(x[b])
        return results.view_as(inputs)
class OldMixtral(Base):
    def forward(s, h):
        b,t,d=h.shape; h=h.view(-1,d); rl=s.gate(h)
        w=F.softmax(rl,dim=1,dtype=torch.float); w,sel=torch.topk(w,2,dim=-1); w/=w.sum(dim=-1,keepdim=True); w=w.to(h.dtype)
        final=torch.zeros((b*t,d),dtype=h.dtype,device=h.device)
        mask=F.one_hot(sel,num_classes=E).permute(2,1,0)
        for e in range(E):
            idx,top=torch.where(mask[e])
            cur=h[None,top].reshape(-1,d); cur=s.experts[e](cur)*w[top,idx,None]
            final.index_add_(0,top,cur.to(h.dtype))
        return final.reshape(b,t,d)
class Shared(Base):
    def forward(s, h):
        shape=h.shape; x=h.reshape(-1,D); w,sel=s.gate(x).softmax(-1).topk(2,-1)
        out=torch.zeros_like(x)
        for e in range(E):
            m=sel==e
            if m.any():
                rows,n=m.nonzero(as_tuple=True)
                out=out.index_add(0,rows,s.experts[e](x[rows])*w[rows,n].unsqueeze(-1))
        return out.view(shape)+s.shared(h)
class Top1(Base):
    def forward(s, h):
        x=h.view(-1,D); p,e=s.gate(x).softmax(-1).max(-1); out=torch.zeros_like(x)
        for i,m in enumerate(s.experts):
            mask=e==i
            out[mask]=m(x[mask])*p[mask].unsqueeze(-1)
        return out.view_as(h)
class DeepSeek(Base):
    def forward(s, h):
        x=h.view(-1,D); sc=s.gate(x).sigmoid(); _,idx=torch.topk(sc+0.1,2,dim=-1,sorted=False); w=sc.gather(1,idx); w=w/(w.sum(-1,keepdim=True)+1e-20)*2.5
        y=torch.zeros_like(x); counts=torch.bincount(idx.flatten(),minlength=E).tolist()
        for i in range(E):
            if counts[i]==0: continue
            r,t=torch.where(idx==i)
            y[r]+=s.experts[i](x[r])*w[r,t,None]
        return (y+s.shared(x)).view(h.shape)
class Logits(Base):  # returns router logits too
    def forward(s,h):
        x=h.view(-1,D); rl=s.gate(x); w,sel=torch.topk(rl.softmax(-1),2,-1); out=torch.zeros_like(x)
        for e in range(E):
            rows,n=torch.where(sel==e)
            out.index_add_(0,rows,s.experts[e](x[rows])*w[rows,n,None])
        return out.view_as(h), rl
class Block(nn.Module):
    def __init__(s,k): super().__init__(); s.mlp=k(); s.norm=nn.LayerNorm(D)
    def forward(s,x):
        r=s.mlp(s.norm(x)); 
        return (x+r[0]+r[1].sum()*0.01) if isinstance(r,tuple) else x+r
class M(nn.Module):
    def __init__(s,k):
        super().__init__(); s.stem=nn.Linear(D,D); s.layers=nn.ModuleList(Block(k) for _ in range(2)); s.head=nn.Linear(D,3)
    def forward(s,x):
        h=s.stem(x)
        for l in s.layers: h=l(h)
        return {"loss": s.head(h).square().mean()}
@pytest.mark.parametrize("k",[Mistral,OldMixtral,Shared,Top1,DeepSeek,Logits])
def test_g(k, monkeypatch):
    torch.manual_seed(0); m=M(k); c={"x":torch.randn(2,6,D)}
    g=cases.traced(m,c); assert not opaque_nodes(g)
    w=tensor_parallel(g,None,2).weights
    assert all(n in w for n in g.parameters if 'expert' in n)
    assert_parity(m,c,None,2,monkeypatch)
