/* test_kernels.c - walks the table of kernels; the cases of everything that is no product, norm or attention.
 */
#include "kernel_cases_elementwise.h"
#include "kernel_cases_embed.h"
#include "kernel_cases_reduce.h"
#include "kernel_cases_update.h"

static void test_every_operation_has_cases(void)
{
    kc_report("kernels");
}

int main(void)
{
    RUN(test_add);
    RUN(test_mul);
    RUN(test_add_mixed_dtypes);
    RUN(test_scale);
    RUN(test_cast);
    RUN(test_cast_transposes);
    RUN(test_cast_rounds_to_nearest_even);
    RUN(test_cast_of_all_bfloat16);
    RUN(test_fill);
    RUN(test_copy_and_fill_large);
    RUN(test_elementwise_refuses);
    RUN(test_sum);
    RUN(test_sum_does_not_depend_on_strides);
    RUN(test_colsum);
    RUN(test_sqnorm);
    RUN(test_finite);
    RUN(test_sum_sources);
    RUN(test_sum_sources_large);
    RUN(test_reduce_refuses);
    RUN(test_embed_fwd);
    RUN(test_embed_fwd_marks_unknown_rows);
    RUN(test_embed_bwd);
    RUN(test_embed_bwd_hot_row);
    RUN(test_embed_refuses);
    RUN(test_step_control);
    RUN(test_step_control_skips);
    RUN(test_adamw);
    RUN(test_sgd);
    RUN(test_adamw_two_tensors_two_steps);
    RUN(test_adamw_moments_decay_to_zero);
    RUN(test_update_refuses);
    RUN(test_every_operation_has_cases);
    return check_report();
}
