def edit(s, *pairs):
    for a,b in pairs:
        assert s.count(a)==1,(s.count(a),a)
        s=s.replace(a,b)
    return s
def body(chains=2, expr="fmaf"):
    init = "float S_max[2];\n" 
    if chains==2:
        loop='''      float most[2] = {-FA_INFINITY, -FA_INFINITY};
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) most[n % 2] = fmaxf(most[n % 2], fmaxf(S_reg[n][2 * r], S_reg[n][2 * r + 1]));
      S_max[r] = fmaxf(most[0], most[1]);
'''
    else:
        loop='''      S_max[r] = -FA_INFINITY;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) S_max[r] = fmaxf(S_max[r], fmaxf(S_reg[n][2 * r], S_reg[n][2 * r + 1]));
'''
    return '''  const auto raise_maximum = [&](float slack) {
    float S_max[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) { // row g, elements 0 and 1 of the fragments; row g + 8, elements 2 and 3
'''+loop+'''    }
    const bool fits = fmaxf(__fmaf_rn(S_max[0], scale_log2, -m_reg[0]), __fmaf_rn(S_max[1], scale_log2, -m_reg[1])) <= slack;
    if (__all_sync(0xffffffff, fits)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) // over the four lanes that share the row
        S_max[r] = fmaxf(S_max[r], __shfl_xor_sync(0xffffffff, S_max[r], mask));
      const float m_new = fmaxf(m_reg[r], S_max[r] * scale_log2);
      alpha[r] = fa::ex2_approx_ftz(m_reg[r] - m_new); // 1 where m stays
      m_reg[r] = m_new;
    }
    return true;
  };
'''
def v1(s, chains=2, barrier=True, exact_lazy=False):
    a=s.index("  const auto raise_maximum = [&] {"); e=s.index("  // l = l * alpha, O = O * alpha. Not while")
    s=s[:a]+body(chains)+s[e:]
    s=edit(s,('''          if constexpr (track) {
            raise_maximum();
''','''          bool raised = false;
          if constexpr (track) {
            raised = raise_maximum(5.f);
'''),
('''          if constexpr (track) rescale();
''','''          if (raised) rescale();
'''),
('''      raise_maximum();
      rescale();
''','''      if (raise_maximum(0.f)) rescale();
''' if exact_lazy else '''      raise_maximum(-FA_INFINITY);
      rescale();
'''))
    if not barrier:
        a=s.index("            // This K has landed long ago."); e=s.index("          }\n          exponentials();",a)
        s=s[:a]+s[e:]
    return s
def v2(s): return v1(s,2,False)
def v4(s): return v1(s,1,True)
def v5(s): return v1(s,2,True,True)
def v6(s): return v1(s,1,False,True)
def v3(s):
    return edit(s,
('''          if constexpr (track) rescale();
''','''          if constexpr (track) {
            if (__any_sync(0xffffffff, alpha[0] < 1.f || alpha[1] < 1.f)) rescale();
          }
'''))

def headroom(s, h="5.f"):
    """a raised maximum lies h above the tile's, so that slowly rising scores fit for longer"""
    return edit(s,('''      const float m_new = fmaxf(m_reg[r], S_max[r] * scale_log2);
''',f'''      const bool rose = S_max[r] * scale_log2 > m_reg[r] + slack;
      const float m_new = rose ? S_max[r] * scale_log2 + slack : m_reg[r];
'''))
def v7(s): return headroom(v5(s))
def short(s, keys): return edit(s,("    int track_to = max(seen / Bc * Bc - Bc, 0);\n",f"    int track_to = seen <= {keys} ? 0 : max(seen / Bc * Bc - Bc, 0);\n"))
def v8(s): return short(v5(s),512)
def v9(s): return short(v5(s),1024)
def v10(s): return edit(v5(s),("    int track_to = max(seen / Bc * Bc - Bc, 0);\n","    int track_to = 0;\n"))
def v11(s):
    """always tracked, no votes at all"""
    s=v10(s)
    return edit(s,("        if (j0 == track_to && peaked()) track_to = 0;\n        right = j0 <= track_to ? overlap(std::false_type(), 0) : overlap(std::true_type(), track_to);\n","        overlap(std::true_type(), 0);\n"))

def dyn(s, slack="5.f"):
    """lazy only where the maximum is tracked to the end: before a voting loop it has to be exact"""
    return edit(s,("            raised = raise_maximum(5.f);\n",f"            raised = raise_maximum(end ? 0.f : {slack});\n"))
def base(s): return s
VARIANTS = {
    "base": base,
    "lazy": lambda s: dyn(v5(s)),
    "lazy 0": lambda s: dyn(v5(s), "0.f"),
    "lazy 2": lambda s: dyn(v5(s), "2.f"),
    "lazy, one chain": lambda s: dyn(v1(s, 1, True, True)),
    "lazy + headroom": lambda s: dyn(v7(s)),
    "lazy, 4 tiles tracked": lambda s: short(dyn(v5(s)), 512),
    "lazy, 8 tiles tracked": lambda s: short(dyn(v5(s)), 1024),
    "always tracked": v11,
    "4 tiles tracked": lambda s: short(s, 512),
}
