import torch
from helpers.measure import libraries, bench
q,k,v=(torch.randn(2,16,1000,128,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
print(libraries.versions(["FA3","FA4"]))
for name in ("FA3","FA4"):
    try:
        m = libraries.module(name)
        if m is None:
            import importlib; importlib.import_module(libraries.PACKAGES[name][0])
    except Exception as e: print(name, repr(e)[:1500])
ref=torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True)
for n,c in libraries.found(causal=True).items():
    o=c(q,k,v); g=torch.autograd.grad(o.float().square().sum(),[q,k,v]); r=torch.autograd.grad(ref.float().square().sum(),[q,k,v],retain_graph=True)
    print(n,(o-ref).abs().max().item(),[(a-b).abs().max().item() for a,b in zip(g,r)])
