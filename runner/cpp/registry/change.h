// The one way to change the desired state. Each function gives the new state, or one sentence why not: then nothing
// has changed.
//
// A change is a merge patch (RFC 7396) of the document:
//   {"models": {"scorer": {"traffic": {"stable": 90, "canary": 10}}}}            other shares
//   {"models": {"scorer": {"versions": {"5": {"bundle": "b.pt2"}}}}}             one more version
//   {"models": {"scorer": {"rollout": {"version": "5", "gates": {"errors": 0.001}}}}}   begin a rollout
//   {"models": {"scorer": {"rollout": null}}}                                    end it: all traffic as before
//   {"models": {"scorer": null}}                                                 the model is gone
//
// What follows from a change is part of it:
// 1. When `stable` is moved, `previous` is where it was.
// 2. A rollout begins from the version that has all the traffic. `stable` is put there, and traffic is by `stable`, so
//    that the new version gets none before its first step.
// 3. While a rollout runs, it alone decides about traffic, `stable`, and its two versions: Code::conflict. So is a
//    second rollout. To end it is always allowed.
// 4. A rollout that is over is a record: a new one takes its place.
//
// Which versions exist has one owner, chosen when the server starts. With Owner::folder or file, a person cannot add,
// take away or exchange versions: Code::conflict. Labels, traffic, settings and rollouts among what is there can be
// changed. What the owner says comes in by `adopted`.
#pragma once

#include <boost/json.hpp>
#include <string>
#include <string_view>

#include "registry/state.h"

namespace mctl {

enum class Owner : std::uint8_t { state, folder, file };
enum class ChangedBy : std::uint8_t { person, server };  // server: may also write the record of a rollout

// Code::invalid names the place and what is allowed, Code::conflict what stands against it.
Result<DesiredState> changed(const DesiredState& state, const boost::json::value& patch, Owner owner = Owner::state,
                             ChangedBy by = ChangedBy::person);

// The state with what the owner has now; `before` is what it had when it was last looked at, the same as `now` when the
// server starts with a state that was kept. Versions and their bundles are the owner's. Of the rest, what the owner has
// changed since `before` is the owner's, and what it has not is as people left it. Labels, traffic and shadows of
// versions that are gone go with them, and a rollout whose new version is gone is taken back.
DesiredState adopted(const DesiredState& state, const DesiredState& before, const DesiredState& now);

// Completes what was read from a file: rules 1 and 2 of it. Code::usage.
Result<DesiredState> completed(DesiredState state);

}  // namespace mctl
