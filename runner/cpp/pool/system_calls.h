// Numbers of system calls that are newer than the headers that some build with; the same on all architectures.
#pragma once

#include <cstdint>

namespace mctl::call {

enum New : std::uint32_t {
  pidfd_send_signal = 424,
  io_uring_setup,
  io_uring_enter,
  io_uring_register,
  open_tree,
  move_mount,
  fsopen,
  fsconfig,
  fsmount,
  fspick,
  pidfd_open,
  clone3,
  openat2 = 437,
  pidfd_getfd,
  faccessat2,
  process_madvise,
  epoll_pwait2,
  mount_setattr,
  quotactl_fd,
  landlock_create_ruleset,
  landlock_add_rule,
  landlock_restrict_self,
  memfd_secret,
  process_mrelease,
  futex_waitv,
  set_mempolicy_home_node,
  cachestat,
  fchmodat2,
  map_shadow_stack,
  futex_wake,
  futex_wait,
  futex_requeue,
  statmount,
  listmount,
  lsm_get_self_attr,
  lsm_set_self_attr,
  lsm_list_modules,
  mseal,
  setxattrat,
  getxattrat,
  listxattrat,
  removexattrat,
  open_tree_attr,
  file_getattr,
  file_setattr,
  listns,
  rseq_slice_yield,
};

}  // namespace mctl::call
