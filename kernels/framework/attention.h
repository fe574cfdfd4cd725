// What the two attention operators share: their checks, and how their work is cut up.
#pragma once

#include <vector>

#include "framework/op.h"
#include "math/attention.h"

namespace hybridge {

// The attributes scale and value_dim, and the kernel for this machine.
class Attention {
 public:
  explicit Attention(const Attributes& attributes);

  // Checks query against the cache and batch.
  void check(const Tensor& query, const Tensor& latent_cache) const;
  // Computes `blocks` into a new output 0; the rows of padding tokens become zero.
  void run(Context& context, const Tensor& query, const Batch& batch, const PagedCache& cache,
           const std::vector<QueryBlock>& blocks) const;

 private:
  float scale_;
  int64_t value_dim_;
  plain::attention_signature* run_ = select_attention();
};

}  // namespace hybridge
