//! Open descriptors: reading, writing, duplicating, locking.

use super::vocabulary::*;
use super::{fcntl, ioctl};
use Direction::{Receive, Send};
use Flow::{Between, Read, Write};
use Interrupted::{EintrIfSocketTimeout, Restarts};

const NO_TIMEOUT: Timeout = Timeout::None;
const DATA: &str = "The descriptor and its offset are the deputy's.";
const PIPES: &str = "Both descriptors are the deputy's; the data never leaves home.";
const OFFSET: Shape = Shape::Rewritten(Len::Fixed(8));
/// copy_file_range writes it only if it has copied something.
const COPY_OFFSET: Shape = inout(8);

rows! {
    0 read HOME [FD, data_out(2), V] {waits(EintrIfSocketTimeout, NO_TIMEOUT) consumes() flow(Read)} DATA;
    1 write HOME [FD, data_in(2), V] {waits(EintrIfSocketTimeout, NO_TIMEOUT) flow(Write)} DATA;
    3 close HOME [FD] {} AT_THE_DEPUTY;
    8 lseek HOME [FD, V, V] {} DATA;
    16 ioctl (Rule::By(ioctl::route, "by the request: Home where its argument is known, else Homeward"))
        (by ioctl::shapes, "by the request") {waits(Restarts, NO_TIMEOUT)}
        "The device is at home; the shape of an unknown request's argument must not be guessed.";
    17 pread64 HOME [FD, data_out(2), V, V] {waits(Restarts, NO_TIMEOUT) flow(Read)} AT_THE_DEPUTY;
    18 pwrite64 HOME [FD, data_in(2), V, V] {waits(Restarts, NO_TIMEOUT) flow(Write)} AT_THE_DEPUTY;
    19 readv HOME [FD, Shape::Segments(Receive, 2), V]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT) consumes() flow(Read)} DATA;
    20 writev HOME [FD, Shape::Segments(Send, 2), V] {waits(EintrIfSocketTimeout, NO_TIMEOUT) flow(Write)} DATA;
    22 pipe HOME [output(8)] {consumes()} "New descriptors are the deputy's.";
    32 dup HOME [FD] {} AT_THE_DEPUTY;
    33 dup2 HOME [FD, FD] {} AT_THE_DEPUTY;
    40 sendfile HOME [FD, FD, OFFSET, V] {waits(Restarts, NO_TIMEOUT) flow(Between(3))} PIPES;
    72 fcntl (Rule::By(fcntl::route, "Home; Homeward for an unknown command"))
        (by fcntl::shapes, "by the command") {waits(Restarts, NO_TIMEOUT)}
        "Flags, locks and owners belong to the deputy's descriptors.";
    73 flock HOME [FD, V] {waits(Restarts, NO_TIMEOUT)} "Locks belong to the deputy's open file.";
    74 fsync HOME [FD] {} AT_THE_DEPUTY;
    75 fdatasync HOME [FD] {} AT_THE_DEPUTY;
    77 ftruncate HOME [FD, V] {} AT_THE_DEPUTY;
    162 sync HOME [] {} "The files are at home.";
    187 readahead HOME [FD, V, V] {} AT_THE_DEPUTY;
    221 fadvise64 HOME [FD, V, V, V] {} AT_THE_DEPUTY;
    275 splice HOME [FD, OFFSET, FD, OFFSET, V, V] {waits(Restarts, NO_TIMEOUT) flow(Between(4))} PIPES;
    276 tee HOME [FD, FD, V, V] {waits(Restarts, NO_TIMEOUT)} PIPES;
    277 sync_file_range HOME [FD, V, V, V] {} AT_THE_DEPUTY;
    278 vmsplice (homeward(reason::GIFTED_PAGES)) [FD, V, V, V] {}
        "It puts the process's own pages into a pipe, which only works on the node of both.";
    285 fallocate HOME [FD, V, V, V] {} AT_THE_DEPUTY;
    292 dup3 HOME [FD, FD, V] {} AT_THE_DEPUTY;
    293 pipe2 HOME [output(8), V] {consumes()} "New descriptors are the deputy's.";
    295 preadv HOME [FD, Shape::Segments(Receive, 2), V, V, V]
        {waits(Restarts, NO_TIMEOUT) consumes()} AT_THE_DEPUTY;
    296 pwritev HOME [FD, Shape::Segments(Send, 2), V, V, V] {waits(Restarts, NO_TIMEOUT)} AT_THE_DEPUTY;
    306 syncfs HOME [FD] {} AT_THE_DEPUTY;
    319 memfd_create HOME [Shape::Text(250), V] {}
        "The descriptor is the deputy's; mapping it shared brings the process home.";
    326 copy_file_range HOME [FD, COPY_OFFSET, FD, COPY_OFFSET, V, V]
        {waits(Restarts, NO_TIMEOUT) flow(Between(4))} PIPES;
    327 preadv2 HOME [FD, Shape::Segments(Receive, 2), V, V, V, V]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT) consumes() flow(Read)} DATA;
    328 pwritev2 HOME [FD, Shape::Segments(Send, 2), V, V, V, V]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT) flow(Write)} DATA;
    436 close_range HOME [V, V, V] {}
        "Descriptors are the deputy's; with CLOSE_RANGE_UNSHARE it only affects the deputy's table.";
    447 memfd_secret HOME [V] {} "The descriptor is the deputy's; mapping it shared brings the process home.";
    451 cachestat HOME [FD, input(16), output(40), V] {} "The pages of files are cached at home.";
}
