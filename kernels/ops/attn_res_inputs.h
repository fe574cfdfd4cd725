// Checks and views that the operators of stage two share.
#pragma once

#include <string>

#include "framework/op.h"
#include "math/attn_res.h"

namespace hybridge {

// Attributes of stage two.
struct AttnResSite {
  explicit AttnResSite(const Attributes& attributes)
      : site(attributes.get_int_at_least("site", 0)), eps(attributes.get_float("eps")) {}

  int64_t site;
  float eps;
};

// The live prefix [T, D], a site's query [D] and the statistics of all sites of its block:
// numerator [S, T, D], logit_max and exp_sum [S, T]. Raises OpError.
inline AttnResUpdate check_attn_res_update(const AttnResSite& site, const Tensor& prefix,
                                           const Tensor& query, const Tensor& numerator,
                                           const Tensor& logit_max, const Tensor& exp_sum) {
  prefix.expect_rank(2, "[T, D]");
  query.expect_rank(1, "[D]").expect_dim(0, prefix.dim(1), "columns of prefix");
  numerator.expect_rank(3, "[S, T, D]")
      .expect_dim(1, prefix.dim(0), "tokens of prefix")
      .expect_dim(2, prefix.dim(1), "columns of prefix");
  for (const Tensor* statistic : {&logit_max, &exp_sum}) {
    statistic->expect_rank(2, "[S, T]")
        .expect_dim(0, numerator.dim(0), "sites of numerator")
        .expect_dim(1, prefix.dim(0), "tokens of prefix");
  }
  if (site.site >= numerator.dim(0)) {
    numerator.fail("has no site " + std::to_string(site.site),
                   "pass the statistics of the site's block");
  }
  AttnResUpdate args;
  args.tokens = prefix.dim(0);
  args.hidden = prefix.dim(1);
  args.eps = site.eps;
  args.prefix = prefix.f32();
  args.query = query.f32();
  args.numerator = numerator.f32() + site.site * args.tokens * args.hidden;
  args.logit_max = logit_max.f32() + site.site * args.tokens;
  args.exp_sum = exp_sum.f32() + site.site * args.tokens;
  return args;
}

// The RMS norm of the mix: its weight [D]. Raises OpError.
inline void add_attn_res_norm(const Tensor& norm_weight, float norm_eps, AttnResUpdate& args) {
  norm_weight.expect_rank(1, "[D]").expect_dim(0, args.hidden, "columns of prefix");
  args.norm_weight = norm_weight.raw();
  args.norm_weight_bf16 = norm_weight.is_bf16();
  args.norm_eps = norm_eps;
}

}  // namespace hybridge
