// The whole C++ interface of the engine, and what holds in all of its headers unless they say
// otherwise.
//
// Errors. A mistake of the caller throws std::invalid_argument, everything else recsdk::Error or
// std::bad_alloc. A call that throws has changed nothing but spare capacity; arrays for its results
// may have been written in part.
//
// Ownership. Spans and pointers in arguments are the caller's, and are used during the call only.
// What a call writes lies over none of its other arrays. Tables and indexes refuse rows, outcomes,
// and what is written for keys or bags, over what the call reads or writes beside, in a call over
// many also where that is another's.
// Configs are copied. What a method returns by reference or as a span lives as long as its object.
// Leases, cuts, leavers and restores share what they need of their index or table, and may outlive
// it.
//
// Threads. Methods of Table, Index and DeviceTable may be called from any thread, also at the same
// time; other classes say what they allow. Destroying or moving an object, and assigning to it,
// comes after all other calls on it. One that was moved from may only be destroyed or assigned to;
// a Lease then counts as released.
//
// Callbacks of a config run under the lock of its table or index, on any thread, and must not call
// it.
//
// Units. Sizes end in _bytes, times in _seconds; strides of matrices count floats.
//
// Binary interface. None is promised: compile against the version that you link. That of
// recsdk/c_api.h has a version and a rule.
#pragma once

#include "recsdk/checkpoint.h"    // IWYU pragma: export
#include "recsdk/columns.h"       // IWYU pragma: export
#include "recsdk/combine.h"       // IWYU pragma: export
#include "recsdk/device_table.h"  // IWYU pragma: export
#include "recsdk/error.h"         // IWYU pragma: export
#include "recsdk/export.h"        // IWYU pragma: export
#include "recsdk/freeze.h"        // IWYU pragma: export
#include "recsdk/index.h"         // IWYU pragma: export
#include "recsdk/initializer.h"   // IWYU pragma: export
#include "recsdk/join_rows.h"     // IWYU pragma: export
#include "recsdk/key_metadata.h"  // IWYU pragma: export
#include "recsdk/leavers.h"       // IWYU pragma: export
#include "recsdk/optimizer.h"     // IWYU pragma: export
#include "recsdk/policy.h"        // IWYU pragma: export
#include "recsdk/routing.h"       // IWYU pragma: export
#include "recsdk/row_file.h"      // IWYU pragma: export
#include "recsdk/row_layout.h"    // IWYU pragma: export
#include "recsdk/runtime.h"       // IWYU pragma: export
#include "recsdk/strings.h"       // IWYU pragma: export
#include "recsdk/table.h"         // IWYU pragma: export
#include "recsdk/types.h"         // IWYU pragma: export
#include "recsdk/vectors.h"       // IWYU pragma: export
