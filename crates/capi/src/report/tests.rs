//! Tests: the functions for C show the figures, warnings and calls of a report.

use std::ffi::CStr;

use super::*;
use pageleap::backend::{Call, Errno, Model};
use pageleap::{Migration, NodeId, Pool, Region, Warning, WarningKind};

#[test]
fn warnings_calls_and_times_are_told_with_their_numbers() {
    let model = std::sync::Arc::new(Model::new());
    let pool = || Pool::builder(NodeId(0), 4096).backend(model.clone()).build().unwrap();
    let (from, to) = (pool(), pool());
    let region = Region::new(&from, 4096).unwrap();
    let mut report = Migration::new().range(&region, 0..4096, &to).start().unwrap().wait();
    let (call, errno) = (Some(Call::Map.name()), Some(Errno(libc::ENOMEM)));
    let kind = WarningKind::Mappings;
    report.warnings = vec![Warning { kind, text: "one".into(), call, errno }];
    (report.counts.windows_first, report.migrate_cpu_ns, report.recycle_cpu_ns) =
        (3, Some(5), None);
    report.calls = [("mmap", 7)].into();
    let report = pageleap_report::new(report);
    // SAFETY: the structures have their sizes, and all zero is a value of them. Texts live as long
    // as the report.
    unsafe {
        let mut figures: pageleap_report_figures = std::mem::zeroed();
        figures.size = size_of::<pageleap_report_figures>();
        let ok = pageleap_status::PAGELEAP_OK;
        assert_eq!(pageleap_report_get_figures(&report, &mut figures), ok);
        let times = (figures.migrate_cpu_ns, figures.recycle_cpu_ns);
        assert_eq!((figures.windows_first, times), (3, (5, u64::MAX)));
        let mut warning: pageleap_warning = std::mem::zeroed();
        warning.size = size_of::<pageleap_warning>();
        assert_eq!(pageleap_report_get_warning(&report, 0, &mut warning), ok);
        assert_eq!((CStr::from_ptr(warning.text), warning.error_number), (c"one", libc::ENOMEM));
        assert_eq!(CStr::from_ptr(warning.call), c"mmap(MAP_FIXED|MAP_SHARED)");
        assert_eq!(warning.kind, pageleap_warning_kind::PAGELEAP_WARNING_MAPPINGS);
        let mut used: pageleap_call_use = std::mem::zeroed();
        used.size = size_of::<pageleap_call_use>();
        assert_eq!(pageleap_report_get_call_use(&report, 0, &mut used), ok);
        assert_eq!((CStr::from_ptr(used.name), used.count), (c"mmap", 7));
        assert_ne!(pageleap_report_get_call_use(&report, 1, &mut used), ok);
    }
}
